"""The table of clients: each failed cell has its reason, and the last recorded run has no failure."""

from typing import Any

from load_tests.agents import AGENTS
from load_tests.records import RESULTS
from load_tests.report import newest
from load_tests.scenarios.clients import CLIENTS, GENERATORS, LIBRARIES, PROGRAMS, RERANKERS, SUBJECTS
from load_tests.tables import clients

FOUND = {
    "a": {"version": "1", "checks": {"chat": {"verdict": "works", "reason": ""}, "cancel": {"verdict": "none", "reason": "has none"}}},
    "b": {"version": "2", "checks": {"chat": {"verdict": "fails", "reason": "Error:\n x | y " + "z" * 500}}},
    "c": {"checks": {}, "reason": "could not be installed: no such package"},
}  # fmt: skip


def test_a_cell_that_is_not_good_says_why_in_a_line() -> None:
    header, *rows = clients.libraries({"libraries": FOUND})
    assert header == ["client", "version", "chat", "cancel"]
    assert rows[0] == ["a", "1", "yes", "\u2013: has none"]
    assert rows[1][2].startswith("**no**: Error: x \\| y zzz")
    assert len(rows[1][2]) < 200
    assert rows[1][3] == "\u2013: not asked"
    assert rows[2] == ["c", "", "**no**: could not be installed: no such package", ""]


def test_every_client_has_a_program() -> None:
    assert all((PROGRAMS / client.program).is_file() for client in CLIENTS.values())


def test_no_client_failed_in_the_last_run() -> None:
    records = newest(RESULTS)
    results: dict[str, Any] = {"agents": records["coding-agents"]["results"]}
    for subject in SUBJECTS:
        results |= records[subject]["results"]
    assert results["libraries"].keys() >= LIBRARIES.keys()
    assert results["generators"].keys() == GENERATORS.keys()
    assert results["agents"].keys() == AGENTS.keys()
    assert results["rerankers"].keys() == RERANKERS.keys()
    for name, client in [item for table in results.values() for item in table.items()]:
        failed = [check for check, outcome in client["checks"].items() if outcome["verdict"] == "fails"]
        assert client["checks"], (name, client.get("reason"))
        assert not failed, (name, failed)
