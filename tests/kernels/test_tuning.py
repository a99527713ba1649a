"""Tables of measured tiles: written, read, looked up, and measured with a scripted clock."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from load_tests import tile_tuning
from pilotlight.kernels import tuning
from pilotlight.kernels.tuning import Sizes, SplitKTile, TileTables
from tests.kernels.conftest import DEVICE

HERE = torch.device(DEVICE)
TILE = SplitKTile(1, 16, 256, 4, 2)


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    """Run each test once: the C library has no part in it."""
    return "triton"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    table = {Sizes(1, 4096, 14336): TILE, Sizes(8, 6, 42): SplitKTile(16, 32, 64, 4, 1)}
    tuning.write_table(tmp_path / "a" / "b.json", table, {"torch": "2.11"})
    assert tuning.read_table(tmp_path / "a" / "b.json") == table
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 1, "gemv": {"1 2": [1]}}', '{"version": 0, "gemv": {}}']
)
def test_an_unreadable_table_is_ignored_and_named(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "damaged.json"
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert tuning.read_table(file) == {}
    assert "damaged.json" in caplog.text


def test_unmeasured_sizes_are_left_to_torch_and_the_users_table_goes_first(tmp_path: Path) -> None:
    tuning.write_table(tmp_path / "shipped" / f"{tuning.device_name(HERE)}.json", {Sizes(4, 6, 42): TILE}, {})
    tables = TileTables(tmp_path / "shipped")
    assert tables.best_tile(3, 6, 42, HERE) == TILE, "three rows use the tile of four"
    assert tables.best_tile(2, 6, 42, HERE) is None
    assert tables.best_tile(9, 6, 42, HERE) is None
    tuning.save({Sizes(2, 6, 42): TILE}, HERE, {})
    tables = TileTables(tmp_path / "shipped")
    assert tables.best_tile(2, 6, 42, HERE) == TILE
    assert tables.best_tile(3, 6, 42, HERE) is None


def test_saving_keeps_what_was_measured_before() -> None:
    tuning.save({Sizes(2, 6, 42): TILE}, HERE, {})
    file = tuning.save({Sizes(1, 6, 42): TILE}, HERE, {})
    assert tuning.read_table(file).keys() == {Sizes(1, 6, 42), Sizes(2, 6, 42)}


class Clock:
    """A scripted clock. For each size it times torch first, then the candidates, of which the second is the fastest."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.asked = 0

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        self.asked += 1
        return self.seconds[min(self.asked, len(self.seconds)) - 1]


def tuned(columns: int, *seconds: float, run: tile_tuning.Product = tuning.run) -> tuning.Table:
    """Return the chosen tiles of products of one token with a weight of six rows."""
    timed = tile_tuning.tune([(6, columns)], HERE, torch.float32, Clock(seconds), most_tokens=1, run=run)
    return tile_tuning.chosen(timed)


@pytest.mark.long
def test_the_fastest_candidate_is_chosen_if_it_is_faster_than_torch() -> None:
    pytest.importorskip("triton")
    candidates = tile_tuning.candidates(Sizes(1, 6, 600))
    assert candidates
    assert tuned(600, 1.0, 0.9, 0.5, 0.7) == {Sizes(1, 6, 600): candidates[1]}
    assert tuned(600, 1.0, 0.99) == {}, "a hundredth is noise"


def test_a_candidate_that_is_wrong_is_never_chosen(caplog: pytest.LogCaptureFixture) -> None:
    assert tuned(300, 1.0, 0.1, run=lambda chosen, x, weight: x @ weight.T + 0.1) == {}
    assert "is wrong for" in caplog.text


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_every_candidate_computes_the_product(tokens: int) -> None:
    pytest.importorskip("triton")
    x, weight, bias = torch.randn(tokens, 600), torch.randn(9, 600), torch.randn(9)
    for candidate in tile_tuning.candidates(Sizes(tokens, 9, 600))[::5]:
        assert torch.allclose(tuning.run(candidate, x, weight, bias), x @ weight.T + bias, atol=1e-3)


def test_no_size_is_started_when_the_time_is_over() -> None:
    assert list(tile_tuning.tune([(6, 600)], HERE, torch.float32, Clock([1.0]), until=0.0)) == []
