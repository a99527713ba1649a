"""Runs of pytest in a copy of the tree, for load_tests/scenarios/mutants.py.

Each run is a process that a server forks. The server has imported the libraries that take seconds to import, but nothing of the project: a run
imports the project's files as they are at that moment.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from load_tests.house import ROOT

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "transformers", "triton", "coverage", "httpx", "starlette", "_pytest.python"])
# The last option: plugins that the server has imported are not rewritten.
OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
TIER = ["-m", "not slow and not network and not long", "--sample", "8", "--seed", "mutants"]


def run_pytest(tree: Path, words: list[str], timeout_s: float, record: Path | None = None) -> int | None:
    """Return pytest's exit code; None if it took too long.

    Write the lines that each test runs to `record`, if that is a path.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as own:
        process = SERVER.Process(target=_run, args=(str(tree), words, own, record))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that its tests left
        process.join()
    return code


def _run(tree: str, words: list[str], own: str, record: Path | None) -> None:
    os.setsid()
    os.chdir(tree)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": tree, "TMPDIR": own}
    tempfile.tempdir = own
    sys.path[:] = [tree, *(path for path in sys.path if path != str(ROOT))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("load_tests", "pilotlight")]:
        del sys.modules[name]  # those of the original tree
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    plugins = [] if record is None else [Recorder(Path(tree), record)]
    sys.exit(pytest.main([*OPTIONS, *TIER, *words], plugins))


class Recorder:
    """A pytest plugin that writes the seconds of each test that passed, and the tests that ran each line."""

    def __init__(self, tree: Path, written: Path) -> None:
        import coverage

        self._tree, self._written = tree, written
        self._coverage = coverage.Coverage(data_file=None, include=[f"{tree}/*"], omit=[f"{tree}/tests/*"])
        self._seconds: dict[str, float] = {}

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        self._began = time.monotonic()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = round(time.monotonic() - self._began, 3)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        files = {
            str(Path(file).relative_to(self._tree)): data.contexts_by_lineno(file) for file in data.measured_files()
        }
        numbers = {test: number for number, test in enumerate(self._seconds)}
        lines = {
            file: {line: [numbers[test] for test in tests if test in numbers] for line, tests in lines.items()}
            for file, lines in files.items()
        }
        self._written.write_text(json.dumps({"seconds": self._seconds, "lines": lines}))
