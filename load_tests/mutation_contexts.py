"""A pytest plugin for load_tests/scenarios/mutants.py that records which tests run which lines.

Writes the tests of each line of $MUTANT_FILE to $MUTANT_COVERAGE, as JSON.
"""

import json
import os
from pathlib import Path
from typing import Any

import coverage
import pytest

_coverage = coverage.Coverage(data_file=None, include=[os.path.realpath(os.environ["MUTANT_FILE"])])


def pytest_sessionstart() -> None:
    _coverage.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    _coverage.switch_context(item.nodeid)


def pytest_sessionfinish() -> None:
    _coverage.stop()
    data = _coverage.get_data()
    lines = {
        line: sorted(filter(None, tests))
        for file in data.measured_files()
        for line, tests in data.contexts_by_lineno(file).items()
    }
    Path(os.environ["MUTANT_COVERAGE"]).write_text(json.dumps(lines))
