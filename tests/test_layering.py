"""The import rules of ARCHITECTURE.md: allowed imports of packages, one name per module, and processes that never load torch."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "support": set(),
    "wire": {"support"},
    "dialects": {"wire", "support"},
    "response_store": {"dialects", "wire", "support"},
    "sites": {"support"},
    "kernels": set(),
    "engine": {"kernels", "support"},
    "page": {"wire", "support"},
    "functions": {"wire", "support", "dialects", "sites", "runtime"},
    "runtime": {"engine", "functions", "wire", "support", "dialects", "response_store", "sites", "page"},
    "edge_router": {"wire", "support", "dialects", "response_store", "sites", "page"},
}
PACKAGES = set(MAY_IMPORT)
# The modules of the engine that a runtime may import: none of them loads torch.
ENGINE_CLIENT_HALF = (
    "engine.api",
    "engine.text",
    "engine.tokenizer",
    "engine.planning",
    "engine.gguf",
    "engine.adapters.peft",
    "engine.grammar.grammar_check",
    "engine.grammar.grammar_compiler",
)
LOAD_TESTS_MAY_IMPORT = PACKAGES - {"dialects", "response_store", "runtime", "functions"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports; those of the product without the prefix `pilotlight.`."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("pilotlight.") for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative imports hide which package they lead to"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}".removeprefix("pilotlight.") for alias in node.names)


def belongs_to(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def ours(path: Path) -> Iterator[str]:
    return (name for name in imported(path) if name.partition(".")[0] in PACKAGES)


def test_every_package_is_reached_by_the_one_import_name() -> None:
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "pilotlight").iterdir() if path.is_symlink()}
    assert links == {package: f"../{package}" for package in PACKAGES}


@pytest.mark.parametrize("folder", [*sorted(PACKAGES), "load_tests", "training", "tests", "examples"])
def test_no_package_is_imported_by_its_folders_name(folder: str) -> None:
    for path in modules(folder):
        for node in import_statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] in PACKAGES], f"{path}:{node}"


@pytest.mark.process
def test_no_module_is_loaded_under_two_names() -> None:
    script = (
        "import importlib, os, sys\n"
        f"for name in {front_end_modules('runtime') + front_end_modules('edge_router')!r}: importlib.import_module(name)\n"
        "files = [os.path.realpath(m.__file__) for m in list(sys.modules.values()) if getattr(m, '__file__', None)]\n"
        f"ours = [file for file in files if file.startswith({str(ROOT)!r}) and '/.venv/' not in file]\n"
        "assert len(ours) > 100 and len(ours) == len(set(ours)), sorted(f for f in set(ours) if ours.count(f) > 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_those_it_may_know(package: str) -> None:
    for path in modules(package):
        for name in ours(path):
            target = name.partition(".")[0]
            assert target == package or target in MAY_IMPORT[package], f"{path} imports {name}"


def test_measurements_import_no_site_and_no_function() -> None:
    measurements = [
        path for path in modules("load_tests") if path.name != "reference.py"
    ]  # reference.py documents every package
    for path in measurements:
        for name in ours(path):
            assert name.partition(".")[0] in LOAD_TESTS_MAY_IMPORT, f"{path} imports {name}"


def test_http_on_sockets_knows_nothing_of_ours_but_errors() -> None:
    for path in modules("wire/http"):
        for name in ours(path):
            assert belongs_to(name, ("wire.http", "wire.errors", "support")), f"{path} imports {name}"


def test_the_runtime_knows_only_the_engines_client_half() -> None:
    for path in modules("runtime"):
        for name in ours(path):
            if name.startswith("engine."):
                assert belongs_to(name, ENGINE_CLIENT_HALF), f"{path} imports {name}"


# What functions may import of the site that serves them: its ASGI helpers. The site passes everything else in.
FUNCTIONS_MAY_IMPORT = ("runtime.api.connection", "runtime.api.middleware")
COMMANDS_MAY_IMPORT = ("runtime.app", "runtime.serve", "runtime.cli")
SITE_MAY_IMPORT = (
    "functions.service",
    "functions.inference",
    "functions.cli",
    "functions.state_dir",  # backups use it
    "functions.bindings.secrets.secret_store",  # backups lock it
    "functions.host.network.egress",  # the only outgoing connections, and their errors
    "functions.channel",
)


def test_functions_and_their_site_know_little_of_each_other() -> None:
    for path in modules("functions"):
        may = FUNCTIONS_MAY_IMPORT + COMMANDS_MAY_IMPORT * path.is_relative_to(ROOT / "functions/cli")
        for name in ours(path):
            assert not belongs_to(name, ("runtime",)) or belongs_to(name, may), f"{path} imports {name}"
    for path in modules("runtime"):
        for name in ours(path):
            assert not belongs_to(name, ("functions",)) or belongs_to(name, SITE_MAY_IMPORT), f"{path} imports {name}"


# Inside the functions package, bindings and the host of functions may import the channel but not each other. The modules above join them. The
# sandbox is below the host: its processes do not depend on requests.
INSIDE_MAY_IMPORT = {
    "channel": ("channel",),
    "bindings": ("bindings", "channel", "manifest", "manifest_tables", "cron", "inference"),
    "host": ("host", "sandbox", "channel", "manifest"),
    "sandbox": ("sandbox", "channel"),
}


@pytest.mark.parametrize("package", sorted(INSIDE_MAY_IMPORT))
def test_bindings_and_processes_of_functions_do_not_know_each_other(package: str) -> None:
    may = tuple(f"functions.{name}" for name in INSIDE_MAY_IMPORT[package])
    for path in modules(f"functions/{package}"):
        for name in ours(path):
            assert not belongs_to(name, ("functions",)) or belongs_to(name, may), f"{path} imports {name}"


def test_what_runs_inside_functions_knows_the_channel_and_the_rules_of_paths_alone() -> None:
    for path in modules("functions/sdk"):
        for name in ours(path):
            assert belongs_to(name, ("functions.channel", "wire.paths")), f"{path} imports {name}"


def test_what_modules_import_is_installed_with_the_product_or_an_extra() -> None:
    """The test environment has more packages than a user's: no module of the product may import a package that only tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    installed = {_canonical(re.split(r"[<>=!;\[ ]", line)[0]) for line in (*project["dependencies"], *extras)}
    owners = dict(packages_distributions()) | {"yarl": ["aiohttp"]}  # aiohttp returns yarl's URLs
    here = {"pilotlight", *(path.stem for path in (ROOT / "functions/sdk").iterdir()), *sys.stdlib_module_names}
    for package in sorted(PACKAGES):
        for path in modules(package):
            if path.is_relative_to(ROOT / "functions/testing"):
                continue  # a pytest plugin for authors of functions
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in {name.partition(".")[0] for name in names} - here:
                    assert installed & {_canonical(owner) for owner in owners.get(name, [])}, f"{path} imports {name}"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def front_end_modules(package: str) -> list[str]:
    """Return the names of all modules of a package that a site's or router's own process may import."""
    names = [".".join(("pilotlight", *path.relative_to(ROOT).with_suffix("").parts)) for path in modules(package)]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    elsewhere = (
        "pilotlight.functions.sdk",
        "pilotlight.functions.testing",
        "pilotlight.functions.sandbox.zygotes.isolate_main",
        "pilotlight.functions.sandbox.zygotes.zygote_main",
        "pilotlight.functions.sandbox.zygotes.prefork",
    )
    return [name for name in names if not name.startswith(elsewhere)]


@pytest.mark.process
@pytest.mark.parametrize("package", ["runtime", "functions", "edge_router"])
def test_no_front_end_process_loads_torch(package: str) -> None:
    """Importing torch takes 2-4 s and more than 200 MB per process."""
    names = front_end_modules(package)
    script = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
