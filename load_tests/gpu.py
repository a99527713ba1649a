"""Commands for a machine with a GPU: `make gpu-check` (correctness), `make gpu-bench` (records).

Both run from the bare tree with any Python that has torch, triton, safetensors, tokenizers, numpy and pytest; each ends within eight minutes and
prints its table last. Without a GPU they say so and exit with status 3, unless asked to rehearse on the CPU. Each part runs in a separate process, so
that a crash of one kernel does not lose the results of others.
"""

import argparse
import ast
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from load_tests.records import write_record

ROOT = Path(__file__).parents[1]
NO_GPU, TOO_LATE = 3, 124
CHECK_S = 440.0
LAST_WORDS_S = 20.0
REHEARSAL_S = 3600.0  # the limit on a machine with two busy cores; a GPU machine has sixteen
# The suites that a bare GPU machine can run: kernels, and the engine in-process (no msgspec, pyzmq, starlette, pydantic there).
CHECKED = ("tests/kernels", "tests/engine")
_REHEARSED = 5  # in a rehearsal, a benchmark may take this many times as long
# Benchmarks with the time limit of each: twice its repeat time, because checking and compiling take time, too. `tune` is the first, because the
# others use its results.
BENCHES = {
    "load_tests.scenarios.tune": 60.0,
    "load_tests.scenarios.engine": 120.0,
    "load_tests.scenarios.gpu_serving": 130.0,
    "load_tests.scenarios.kernels": 180.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=["check", "bench"])
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run small cases on the CPU, to test the command; records only under $OUT",
    )
    parser.add_argument("--only", nargs="+", help="paths to test for a check; modules to run for a bench")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.rehearse:
        print(
            "There is no CUDA device here. On a machine with one, run this again; --rehearse tries it on the CPU.",
            file=sys.stderr,
        )
        return NO_GPU
    if options.subject == "check":
        device, limit_s = ("cpu", REHEARSAL_S) if options.rehearse else ("cuda", CHECK_S)
        return check(device, options.only or CHECKED, plugins(device), limit_s)
    return bench(options.rehearse, {name: BENCHES[name] for name in options.only or BENCHES})


def check(device: str, paths: tuple[str, ...] | list[str], options: list[str], limit_s: float) -> int:
    """Run the suites of kernels/ and engine/ with their tensors on `device`.

    `options` are those of pytest's plugins. A suite runs in a separate process: one that hangs or crashes does not lose the other's results.
    Tests marked `cpu_only` are left out, in a rehearsal too.
    """
    left_out = unimportable(paths, ROOT)
    counts: dict[str, dict[str, Any]] = {}
    statuses: dict[str, int] = {}
    end = time.monotonic() + limit_s
    for path in paths:
        ignored = [f"--ignore={ROOT / name}" for name in left_out if name.startswith(path)]
        statuses[path], found = run_suite(path, device, [*options, *ignored], max(0.1, end - time.monotonic()))
        counts |= found
    status = max(statuses.values(), key=abs)
    results = {"device": device, "status": status, "suites": statuses, "files": counts, "left_out": left_out}
    show(results)
    if device == "cuda" or os.environ.get("OUT"):
        print(f"Record: {write_record('check', results, ('torch', 'triton', 'pytest'))}")
    return status


def run_suite(path: str, device: str, options: list[str], limit_s: float) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run one suite without the project's own pytest settings.

    They name plugins that a bare machine lacks.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "--import-mode=importlib",
            "-m", "not slow and not cpu_only", "-W", "ignore::pytest.PytestUnknownMarkWarning", f"--junitxml={report}", *options, path,
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PILOTLIGHT_TEST_DEVICE": device, "PYTHONPATH": str(ROOT)}
        status = run_within(command, limit_s, environment)
        if status == TOO_LATE:
            print(f"{path} did not end within {limit_s:.0f} s.")
        return status, by_file(report) if report.exists() else {}


def run_within(command: list[str], limit_s: float, environment: dict[str, str] | None = None) -> int:
    """Run a command and return its status.

    After the limit it is interrupted, which leaves it time to write its results; then killed.
    """
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
            process.kill()
            return TOO_LATE


def plugins(device: str) -> list[str]:
    """Return the options of the pytest plugins that are installed.

    pytest-xdist runs several processes, since most of the time goes into compiling on the host. pytest-timeout limits each test; on a GPU it ends the
    process, because a signal does not interrupt a wait for a kernel.
    """
    options = ["--timeout=120"] if importlib.util.find_spec("pytest_timeout") is not None else []
    if options and device == "cuda":
        options += ["--timeout-method=thread"]
    if importlib.util.find_spec("pytest_asyncio") is not None:
        options += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal"]
    return options


def unimportable(paths: tuple[str, ...] | list[str], root: Path) -> dict[str, list[str]]:
    """Return the test files of a tree that need packages that this machine lacks, with those packages."""
    files = [file for path in paths if (root / path).is_dir() for file in sorted((root / path).rglob("test_*.py"))]
    needed = {str(file.relative_to(root)): imports(file, root, set()) for file in files}
    missing = {name for name in set().union(*needed.values()) if not is_here(name, root)}
    return {file: sorted(names & missing) for file, names in needed.items() if names & missing}


def is_here(package: str, root: Path) -> bool:
    is_ours = (root / package).is_dir() or (root / f"{package}.py").exists()
    return is_ours or importlib.util.find_spec(package) is not None


def imports(file: Path, root: Path, seen: set[Path]) -> set[str]:
    """Return the packages that a file imports, directly or through our own files."""
    seen.add(file)
    whole = file.read_text(encoding="utf-8")
    names = {"pytest_asyncio"} if "async def test_" in whole else set()
    for node in ast.parse(whole).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        names.update(module.partition(".")[0] for module in modules)
        parents = [
            root.joinpath(*parts[:i]) for parts in (m.split(".") for m in modules) for i in range(1, len(parts) + 1)
        ]
        for ours in (path for parent in parents for path in (parent.with_suffix(".py"), parent / "__init__.py")):
            if ours.exists() and ours not in seen:
                names |= imports(ours, root, seen)
    return names


def by_file(report: Path) -> dict[str, dict[str, Any]]:
    """Return counts for each test file, and the names of failed tests."""
    counts: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        row = counts.setdefault(
            case.get("classname", "?"), {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": []}
        )
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        row[outcome] += 1
        row["seconds"] += float(case.get("time", 0.0))
        if outcome == "failed":
            row["failures"].append(case.get("name"))
    return counts


def show(results: dict[str, Any]) -> None:
    print(f"\n{'on ' + results['device']:<60} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for name, row in sorted(results["files"].items()):
        print(f"{name:<60} {row['passed']:>7} {row['failed']:>7} {row['skipped']:>7} {row['seconds']:>8.1f}")
    for name, needs in results["left_out"].items():
        print(f"{name:<60} left out: needs {', '.join(needs)}")
    total = {kind: sum(row[kind] for row in results["files"].values()) for kind in ("passed", "failed", "skipped")}
    print(
        f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped; status "
        + ", ".join(f"{status} of {path}" for path, status in results["suites"].items())
    )


def bench(rehearses: bool, benches: Mapping[str, float], run: Callable[[list[str], float], int] = run_within) -> int:
    """Run modules with time limits one after the other; return the worst status."""
    worst = 0
    for module, given_s in benches.items():
        limit_s = given_s * (_REHEARSED if rehearses else 1)
        command = [sys.executable, "-m", module, "--budget-s", str(8.0 if rehearses else limit_s / 2)]
        command += ["--rehearse"] if rehearses else []
        print(f"\n== {module}", flush=True)
        status = run(command, limit_s)
        if status == TOO_LATE:
            print(f"It did not end within {limit_s:g} s.")
        worst = max(worst, abs(status))
    return worst


if __name__ == "__main__":
    sys.exit(main())
