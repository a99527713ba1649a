"""The record of routing simulations: its results are kept and not simulated again, and tables need only the record."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from load_tests.scenarios import routing
from load_tests.scenarios.routing_scale import planned_sessions
from load_tests.sim.outcome import Outcome
from load_tests.sim.traces import Trace
from load_tests.sim.trouble import NONE, TROUBLES, Trouble
from load_tests.sim.world import HELD_OUT_SEEDS, TUNING_SEEDS
from load_tests.tables.routing import (
    OURS,
    policy_rows,
    pool_rows,
    rows,
    scale_rows,
    table_rows,
    trouble_rows,
    worst_rows,
)
from pilotlight.edge_router.routing.cost import Assumptions
from pilotlight.edge_router.routing.views import Policy


class FakeSimulation:
    """A simulation whose figures depend only on policy, trace, load, seed and trouble."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str, str, int, str]] = []
        self.sources = routing.Sources(
            self,
            lambda: {"330": {"rank_us": 250.0, "llm_d_rank_us": 1000.0}},
            lambda: {"full_bytes": 44_000, "without_digest_bytes": 600},
        )

    def __call__(
        self, policy: str, make: Callable[[], Policy], trace: Trace, load: str, requests: int, seed: int, trouble: Trouble = NONE
    ) -> Outcome:  # fmt: skip
        self.runs.append((policy, trace.name, load, seed, trouble.name))
        figure = crc32(f"{self.runs[-1]}".encode()) % 1000 + 1.0
        given: dict[str, Any] = {"policy": policy, "trace": trace.name, "load": load, "seed": seed}
        plain: dict[str, Any] = {field.name: {} if "dict" in str(field.type) else figure for field in fields(Outcome)}
        return Outcome(**{**plain, **given})


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSimulation:
    fake = FakeSimulation()
    monkeypatch.setenv("OUT", str(tmp_path))
    return fake


def run(simulation: FakeSimulation, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    asked = ["--policies", OURS, "llm-d", "round robin", "--pool-requests", "60", *arguments]
    routing.main(asked, simulation.sources)
    (written,) = tmp_path.glob("*routing.json")
    record: dict[str, Any] = json.loads(written.read_text())["results"]
    return record


@pytest.mark.process
def test_a_record_has_every_cell_and_trouble_and_its_tables(simulation: FakeSimulation, tmp_path: Path) -> None:
    results = run(simulation, tmp_path, "--traces", "chat", "agent")
    assert len(results["cells"]) == 2 * 2 * 3
    assert results["seeds"] == list(HELD_OUT_SEEDS[:3])
    assert not set(results["seeds"]) & set(TUNING_SEEDS)
    assert [line[0] for line in list(rows(results))[1:]] == [
        "chat, moderate", "chat, heavy", "agent, moderate", "agent, heavy",
    ]  # fmt: skip
    troubles = list(trouble_rows(results))
    assert [line[0] for line in troubles[1:]] == list(TROUBLES)
    assert all(cell.endswith("(1.00)") for cell in troubles[1][1:])
    assert [line[1] for line in scale_rows(results)] == ["330 sites", "0.25", "1.00", "116.2", "1.6"]
    by_policy = list(policy_rows(results, "heavy"))
    assert by_policy[0] == ["p95 / p99, s, heavy load", "chat", "agent"]
    assert [line[0] for line in by_policy[1:]] == [OURS, "llm-d", "round robin"]
    pools = list(pool_rows(results))
    assert len(pools) == 1 + 4 * 2
    assert pools[0][1:] == ["no split", "split, by requests", "split, by tokens", "split where it pays"]
    llm_d, ours = results["parameters"]["llm-d"], results["parameters"][OURS]
    assert llm_d["chosen"] in llm_d["grid"]
    assert len(llm_d["grid"]) == 6
    assert ours["chosen"]["assumptions"]["delay_share"] == Assumptions().delay_share


def test_a_policy_is_judged_by_how_far_it_is_from_the_best_in_the_median_and_the_worst_case() -> None:
    def cell(policy: str, trace: str, p95_ms: float) -> dict[str, Any]:
        figure = {"median": p95_ms, "n": 2 if policy != "one run" else 1}
        return {"policy": policy, "trace": trace, "load": "heavy", "p95_ms": figure, "p99_ms": figure}

    times = {"a": (100.0, 104.0, 100.0), "b": (300.0, 100.0, 101.0), "oracle": (1.0,) * 3, "one run": (2.0,) * 3}
    cells = [cell(name, str(i), ms) for name, row in times.items() for i, ms in enumerate(row)]
    header, *lines = worst_rows({"cells": cells, "seeds": [1, 2]})
    assert len(header) == 5
    assert lines == [
        ["a", "1.00, 1.04", "2, 3 of 3", "1.00, 1.04", "2, 3 of 3"],
        ["b", "1.01, 3.00", "1, 2 of 3", "1.01, 3.00", "1, 2 of 3"],
    ]


def test_a_part_has_a_subject_of_its_own(simulation: FakeSimulation, tmp_path: Path) -> None:
    routing.main([
        "--policies", OURS, "--traces", "chat", "--loads", "heavy", "--no-troubles", "--no-pools", "--quiet",
        "--subject", "routing-part",
    ], simulation.sources)  # fmt: skip
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["subject"] == "routing-part"


def test_ten_million_conversations_are_planned_by_what_an_entry_was_measured_to_take() -> None:
    plan = planned_sessions(400.0)
    assert plan["conversation_bytes"] == 2400
    assert plan["entries"] == pytest.approx(10_000_000 * 6 / 330, abs=1)
    assert plan["table_mib"] == pytest.approx(plan["entries"] * 400 / 2**20, abs=0.1)
    assert plan["published"] == pytest.approx(8192 / (10_000_000 * 6 / 330), rel=0.01)
    shown = dict(list(table_rows({"statuses": {"sessions": plan}}))[1:])
    assert shown["bytes of memory: a prefix, a conversation"] == "400, 2,400"
    assert list(table_rows({"statuses": {}})) == [["", "planned"]]


@pytest.mark.long
def test_what_was_simulated_is_not_repeated(simulation: FakeSimulation, tmp_path: Path) -> None:
    arguments = ("--traces", "chat", "--resume", str(tmp_path / "runs"))
    first = run(simulation, tmp_path, *arguments)
    simulated = len(simulation.runs)
    assert run(simulation, tmp_path, *arguments) == first
    assert len(simulation.runs) == simulated


def test_a_record_of_what_is_known_simulates_nothing_and_says_of_how_many_seeds_each_figure_is(
    simulation: FakeSimulation, tmp_path: Path
) -> None:
    kept = ("--traces", "chat", "--loads", "heavy", "--no-troubles", "--quiet", "--resume", str(tmp_path / "runs"))
    run(simulation, tmp_path, *kept, "--seeds", "91", "92")
    simulated = len(simulation.runs)
    assert simulated == 2 * 3
    results = run(simulation, tmp_path, *kept[2:], "--traces", "chat", "agent", "--known", "--seeds", "91", "92", "93")
    assert len(simulation.runs) == simulated
    assert [(cell["policy"], cell["trace"], cell["p95_ms"]["n"]) for cell in results["cells"]] == [
        (policy, "chat", 2) for policy in (OURS, "llm-d", "round robin")
    ]
    assert [line[0] for line in policy_rows(results, "heavy")][1:] == [
        f"{policy} (2 seed)" for policy in (OURS, "llm-d", "round robin")
    ]


def test_tuning_tries_every_grid_on_a_tuning_seed_alone(
    simulation: FakeSimulation, capsys: pytest.CaptureFixture[str]
) -> None:
    routing.main(["--tune", "--policies", "llm-d", "llm-d, declining"], simulation.sources)
    assert {seed for *_, seed, _ in simulation.runs} == {TUNING_SEEDS[0]}
    assert len(simulation.runs) == (6 + 16) * len(routing.TUNED_ON)
    assert capsys.readouterr().out.count("best") == 2
