"""The routing record: others' figures are taken from an earlier record only where the simulation still replays them."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from zlib import crc32

import pytest

from edge_router.policy import Policy
from load_tests.scenarios import routing
from load_tests.sim.load import LOADS
from load_tests.sim.outcome import Outcome
from load_tests.sim.traces import TRACES, Trace
from load_tests.sim.world import HELD_OUT_SEEDS
from load_tests.tables.routing import OURS


class FakeSimulation:
    """Figures that depend on policy, trace, load and seed alone, and on a version for the policies named."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.simulated: set[tuple[str, str, str]] = set()

    def __call__(
        self, policy: str, make: Callable[[], Policy], trace: Trace, load: str, requests: int, seed: int
    ) -> Outcome:
        self.simulated.add((policy, trace.name, load))
        figure = crc32(f"{policy} {trace.name} {load} {seed} {policy in self.changed}".encode()) % 1000 + 1.0
        given = {"policy": policy, "trace": trace.name, "load": load, "seed": seed}
        plain = {field.name: {} if "dict" in str(field.type) else figure for field in fields(Outcome)}
        return Outcome(**{**plain, **given})  # type: ignore[arg-type]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSimulation:
    fake = FakeSimulation()
    monkeypatch.setattr(routing, "simulate", fake)
    monkeypatch.setenv("OUT", str(tmp_path))
    return fake


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["routing", *arguments])
    routing.main()


def whole_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    run(monkeypatch)
    (written,) = tmp_path.glob("*routing.json")
    return written.rename(tmp_path / "earlier.json")


def test_others_are_kept_and_ours_are_simulated_anew(
    simulation: FakeSimulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = whole_record(monkeypatch, tmp_path)
    simulation.changed.add(OURS)
    simulation.simulated.clear()
    run(monkeypatch, "--keep-others", str(earlier))
    (written,) = tmp_path.glob("*routing.json")
    old, new = (json.loads(path.read_text())["results"]["cells"] for path in (earlier, written))
    assert [(c["trace"], c["load"], c["policy"]) for c in new] == [(c["trace"], c["load"], c["policy"]) for c in old]
    assert {cell["policy"] for cell, before in zip(new, old, strict=True) if cell != before} == {OURS}
    others = len(routing.POLICIES) - 2
    assert len(simulation.simulated) == 2 * len(TRACES) * len(LOADS) + others
    assert json.loads(written.read_text())["results"]["others_kept_from"]["replayed_alike"]


def test_a_simulation_that_no_longer_replays_the_record_keeps_nothing_of_it(
    simulation: FakeSimulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = whole_record(monkeypatch, tmp_path)
    simulation.changed.add("GORGO")
    with pytest.raises(SystemExit, match=r"GORGO on .* is not what the record says"):
        run(monkeypatch, "--keep-others", str(earlier))
    assert not list(tmp_path.glob("*routing.json"))


def test_a_record_of_other_seeds_is_refused(
    simulation: FakeSimulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = whole_record(monkeypatch, tmp_path)
    record = json.loads(earlier.read_text())
    record["results"]["seeds"] = [1, *HELD_OUT_SEEDS[1:]]
    earlier.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="other seeds"):
        run(monkeypatch, "--keep-others", str(earlier))
