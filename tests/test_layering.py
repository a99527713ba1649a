"""The import arrows of ARCHITECTURE.md: who may know whom, and which processes never load torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"wire", "dialects", "sites", "kernels", "engine", "runtime", "edge_router", "page", "load_tests"}
MAY_IMPORT: dict[str, set[str]] = {
    "wire": set(),
    "dialects": {"wire"},
    "sites": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "page": {"wire"},
    "runtime": {"engine", "wire", "dialects", "sites", "page"},
    "edge_router": {"wire", "dialects", "sites", "page"},
    "load_tests": {"wire", "sites", "kernels", "edge_router", "engine", "page"},
}
ENGINE_CLIENT_HALF = {
    "protocol",
    "frames",
    "client",
    "keys",
    "socket_client",
    "step_journal",
    "tokenizer",
    "chat_template",
    "formats",
    "image_prompt",
    "image_file",
    "gpu_state",
    "planning",
    "errors",
    "peft",
    "gguf",
    "grammar_check",
    "grammar_compiler",
    "guarded_pool",
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which package they lead to"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_those_it_may_know(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            target = name.partition(".")[0]
            assert target not in PACKAGES or target == package or target in MAY_IMPORT[package], (
                f"{path} imports {name}"
            )


def test_http_on_sockets_knows_nothing_of_ours_but_errors_and_background_tasks() -> None:
    for path in modules("wire/http"):
        for name in imported(path):
            ours = name.partition(".")[0] in PACKAGES
            assert not ours or name.startswith(("wire.http", "wire.errors", "wire.background")), (
                f"{path} imports {name}"
            )


def test_the_runtime_knows_only_the_engines_client_half() -> None:
    for path in modules("runtime"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "engine" and len(parts) > 1:
                assert parts[1] in ENGINE_CLIENT_HALF, f"{path} imports {name}"


# What functions may import of the site they are served by: how ASGI is spoken here, and how a file is written for good. All else is passed in.
FUNCTIONS_MAY_IMPORT = ("runtime.functions", "runtime.connection", "runtime.middleware")
COMMANDS_MAY_IMPORT = ("runtime.app", "runtime.serve", "runtime.cli")
SITE_MAY_IMPORT = (
    "runtime.functions.service",
    "runtime.functions.inference",
    "runtime.functions.cli",
    "runtime.functions.host.egress",  # the one way into the world, with the words that it speaks
    "runtime.functions.channel",
)


def belongs_to(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_functions_and_their_site_know_little_of_each_other() -> None:
    functions = ROOT / "runtime/functions"
    for path in modules("runtime"):
        is_command = path.is_relative_to(functions / "cli")
        for name in imported(path):
            if path.is_relative_to(functions):
                may = FUNCTIONS_MAY_IMPORT + COMMANDS_MAY_IMPORT * is_command
                assert not belongs_to(name, ("runtime",)) or belongs_to(name, may), f"{path} imports {name}"
            elif belongs_to(name, ("runtime.functions",)):
                assert belongs_to(name, SITE_MAY_IMPORT), f"{path} imports {name}"


# Within: what runs functions and what they bind know the channel, and not each other; what joins them lies above.
INSIDE_MAY_IMPORT = {
    "channel": ("channel",),
    "bindings": ("bindings", "channel", "manifest", "manifest_tables", "cron", "inference"),
    "host": ("host", "channel", "manifest"),
}


@pytest.mark.parametrize("package", sorted(INSIDE_MAY_IMPORT))
def test_bindings_and_processes_of_functions_do_not_know_each_other(package: str) -> None:
    may = tuple(f"runtime.functions.{name}" for name in INSIDE_MAY_IMPORT[package])
    for path in modules(f"runtime/functions/{package}"):
        for name in imported(path):
            assert not belongs_to(name, ("runtime.functions",)) or belongs_to(name, may), f"{path} imports {name}"


def test_what_runs_inside_functions_knows_the_channel_alone() -> None:
    for path in modules("runtime/functions/sdk"):
        for name in imported(path):
            assert not belongs_to(name, tuple(PACKAGES)) or belongs_to(name, ("runtime.functions.channel",)), (
                f"{path} imports {name}"
            )


@pytest.mark.parametrize("package", ["runtime", "edge_router"])
def test_no_front_end_process_loads_torch(package: str) -> None:
    """Importing torch costs 2-4 s and more than 200 MB, in each of a site's processes but the engine's."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules(package)]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    in_functions = (
        "runtime.functions.sdk.",
        "runtime.functions.host.isolate_main",
        "runtime.functions.host.zygote_main",
        "runtime.functions.host.prefork",
    )
    names = [name for name in names if not name.startswith(in_functions)]
    script = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
