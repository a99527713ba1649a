"""The enforcement of the tests' tiers, on small suites that run in separate processes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from load_tests.house import ROOT
from tests.rooms import files_for

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.process

SUITE = """
import socket, subprocess, sys
import pytest

@pytest.mark.parametrize("n", range(100))
def test_table(n): pass

@pytest.mark.long
@pytest.mark.parametrize("n", range(100))
def test_sweep(n): pass

def test_forgets_its_tier(): subprocess.run([sys.executable, "-c", ""])

@pytest.mark.process
def test_says_its_tier(): subprocess.run([sys.executable, "-c", ""])

@pytest.fixture
def port(process_tier):
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made

def test_uses_a_fixture_that_says_it(port): pass
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['unit', 'process', 'network', 'long']\n")
    pytester.makepyfile(SUITE)
    return lambda *words: pytester.runpytest_subprocess("-p", "tests.tiers", "-p", "no:asyncio", *words)


def test_a_unit_test_that_starts_a_process_fails_with_the_place(run: Run) -> None:
    result = run("-k", "tier or fixture")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.re_match_lines([r".*a unit test starts a process in .*: mark it `process`"])


def test_a_fixture_s_tier_is_that_of_the_tests_that_use_it(run: Run) -> None:
    run("-m", "process").assert_outcomes(passed=2, deselected=201)


def test_a_seed_draws_the_same_cases_from_every_part_of_a_table_and_another_seed_others(run: Run) -> None:
    draws = {seed: _cases(run("--sample", "10", "--seed", seed, "-m", "unit", "--collect-only", "-q")) for seed in "ab"}
    for drawn in draws.values():
        assert [case // 10 for case in sorted(drawn["test_table"])] == list(range(10))
        assert [case // 50 for case in sorted(drawn["test_sweep"])] == [0, 1]
    assert draws["a"] != draws["b"]
    assert _cases(run("--sample", "10", "--seed", "a", "-m", "unit", "--collect-only", "-q")) == draws["a"]


def _cases(result: pytest.RunResult) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, case in re.findall(r"::(\w+)\[(\d+)\]", result.stdout.str()):
        found.setdefault(name, set()).add(int(case))
    return found


def test_a_folder_s_tests_are_its_own_and_those_of_what_imports_it() -> None:
    found = files_for("engine/kv")
    assert Path("tests/engine/kv/tiers/test_host_tier.py") in found  # a test of the folder itself
    assert Path("tests/engine/scheduling/test_scheduler.py") in found  # the scheduler imports it
    assert Path("tests/dialects/body/test_bodies.py") not in found
    with pytest.raises(SystemExit, match="no folder of the product is called 'engine/vk'"):
        files_for("engine/vk")
