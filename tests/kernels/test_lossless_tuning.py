"""Products in 12 bits are chosen where a clock says that they are faster than plain ones, and only there."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels import lossless_tuning, tuning
from kernels.lossless import pack_lossless
from kernels.tuning import LOSSLESS, Sizes, SplitKTile
from tests.kernels.conftest import DEVICE

HERE = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    """Once is enough: the C library has no part in it."""
    return "triton"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "MOST_LOSSLESS_TOKENS", 1)
    tuning._table_of.cache_clear()
    yield
    tuning._table_of.cache_clear()


def clock(*seconds: float) -> tuning.Clock:
    """The plain product's first, then the candidates'."""
    left = list(seconds)

    def timed(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return left.pop(0) if len(left) > 1 else left[0]

    return timed


def test_the_fastest_candidate_is_chosen_if_it_is_faster_than_the_plain_product() -> None:
    candidates = lossless_tuning.candidates(Sizes(1, 16, 256))
    found = tuning.chosen(lossless_tuning.tune([(16, 256)], HERE, torch.float32, clock(1.0, 0.9, 0.5, 0.7)))
    assert found == {Sizes(1, 16, 256): candidates[1]}
    assert not tuning.chosen(lossless_tuning.tune([(16, 256)], HERE, torch.float32, clock(1.0, 0.99)))


def test_a_candidate_that_is_wrong_is_never_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lossless_tuning, "run", lambda chosen, x, weight: x @ weight.unpack(x.dtype).T + 0.1)
    assert not tuning.chosen(lossless_tuning.tune([(16, 256)], HERE, torch.float32, clock(1.0, 0.1)))
    assert "is wrong for" in caplog.text


def test_both_tables_of_a_device_are_apart() -> None:
    tile = SplitKTile(1, 16, 64, 4, 2)
    tuning.save({Sizes(1, 6, 42): tile}, HERE, {}, LOSSLESS)
    assert tuning.best_lossless_tile(1, 6, 42, HERE) == tile
    assert tuning.best_lossless_tile(2, 6, 42, HERE) is None
    assert tuning.best_tile(1, 6, 42, HERE) is None


@pytest.mark.parametrize("tokens", [1, 16])
def test_every_candidate_computes_the_product(tokens: int) -> None:
    plain = torch.randn(9, 600).to(torch.bfloat16)
    x, weight, bias = torch.randn(tokens, 600), pack_lossless(plain), torch.randn(9)
    for candidate in lossless_tuning.candidates(Sizes(tokens, 9, 600))[::3]:
        assert torch.allclose(
            lossless_tuning.run(candidate, x, weight, bias), x @ plain.float().T + bias, atol=1e-3, rtol=1e-3
        )
