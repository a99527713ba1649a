"""Mutants of a few lines: each changes one operator or value, and code without effect on behaviour has no mutants."""

import json
from pathlib import Path

import pytest

from load_tests.house import ROOT, House
from load_tests.mutation import mutants_of
from load_tests.mutation_runs import run_pytest
from load_tests.scenarios.mutants import RISK, draw, summary


def changed(statement: str) -> set[str]:
    """Return the statement in each of its mutants."""
    source = f"def f(a, b):\n    {statement}\n"
    return {mutant.applied_to(source).splitlines()[1].strip() for mutant in mutants_of(source)}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("c = a < b", {"c = a <= b"}),
        ("c = a is not b", {"c = a is b"}),
        ("c = a not in b", {"c = a in b"}),
        ("c = a and (b) and c", {"c = a or (b) and c", "c = a and (b) or c"}),
        ("c = not a", {"c = a"}),
        ("c = a // 2", {"c = a * 2", "c = a // 3"}),
        ("c = True", {"c = False"}),
        ("return a", {"return None"}),
        ("a.clear()", {"pass"}),
        ("c = '\u00e9' + a", {"c = '\u00e9' - a"}),
        ("if a: b = c", {"if (not (a)): b = c"}),
    ],
)
def test_each_mutant_changes_one_thing(statement: str, expected: set[str]) -> None:
    assert changed(statement) == expected


@pytest.mark.parametrize(
    "statement",
    ["'''Is 1 < 2?'''", "log.info('%d', a + 1)", "c = f'{a + 1}'", "return None", "c: 'a < b' = a", "assert a < 3"],
)
def test_what_says_nothing_about_behaviour_has_no_mutants(statement: str) -> None:
    assert changed(statement) == set()


def test_code_outside_functions_has_no_mutants() -> None:
    assert mutants_of("MOST = 3 + 4\n") == []


def test_the_same_seed_draws_the_same_mutants_and_none_twice(tmp_path: Path) -> None:
    for package in RISK:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "one.py").write_text("def f(a):\n    return [" + "a + 1, " * 20 + "]\n")
    first, again, other = ([*draw(House(tmp_path), 30, seed)] for seed in ("1", "1", "2"))
    assert [mutant for _, mutant in first] == [mutant for _, mutant in again]
    assert [mutant for _, mutant in first] != [mutant for _, mutant in other]
    assert len({(module.file, mutant) for module, mutant in first}) == 30


def test_what_no_test_meets_counts_as_not_noticed() -> None:
    outcomes = ("noticed", "unmet")
    found = {f"wire/{outcome}.py:1:2 not": {"outcome": outcome} for outcome in outcomes}
    assert summary(found) == {
        "judged": 2,
        "noticed": 1,
        "noticed_share": 0.5,
        "packages": {"wire": {"noticed": 1, "unmet": 1}},
    }


@pytest.mark.process
@pytest.mark.long
def test_a_run_records_the_lines_that_each_test_runs(tmp_path: Path) -> None:
    record = tmp_path / "lines.json"
    assert run_pytest(ROOT, ["tests/wire/test_lines.py"], 100, record) == 0
    recorded = json.loads(record.read_text())
    tests = [*recorded["seconds"]]
    run_by = {tests[number] for numbers in recorded["lines"]["wire/lines.py"].values() for number in numbers}
    assert run_by
    assert run_by <= set(tests)
    assert run_pytest(ROOT, ["-x", "tests/wire/test_lines.py::test_there_is_none"], 100) not in (0, 5)
