"""The selection of keys by their scores, compared with sorting them."""

import pytest
import torch

from pilotlight.kernels.attention.key_index import index_scores, index_write, select_keys
from pilotlight.kernels.checks import ArgumentError


def by_sorting(scores: torch.Tensor, visible: int, top_k: int) -> list[int]:
    """Return the positions of the largest scores; of equal ones the first."""
    best = sorted(range(visible), key=lambda position: (-float(scores[position]), position))[:top_k]
    return sorted(best)


@pytest.mark.parametrize("levels", [2, 5, 1000], ids=["mostly ties", "many ties", "few ties"])
def test_the_largest_scores_are_selected_and_of_equal_ones_the_first(levels: int) -> None:
    visible = torch.tensor([1, 7, 8, 9, 40, 64, 64])
    scores = torch.randint(0, levels, (7, 64)).float() - levels // 2
    positions = select_keys(scores, visible, 8)
    for row, seen in enumerate(visible.tolist()):
        wanted = by_sorting(scores[row], seen, 8)
        assert positions[row, : len(wanted)].tolist() == wanted
        assert positions[row].max() < 64


def test_a_selection_does_not_depend_on_the_length_of_its_row() -> None:
    scores, visible = torch.randint(0, 3, (5, 90)).float(), torch.tensor([20, 33, 50, 60, 60])
    assert torch.equal(select_keys(scores, visible, 16), select_keys(scores[:, :60], visible, 16))


def test_scores_that_are_not_numbers_select_positions_of_the_cache() -> None:
    positions = select_keys(torch.full((2, 30), torch.nan), torch.tensor([30, 20]), 8)
    assert int(positions.min()) >= 0
    assert int(positions.max()) < 30


def test_bad_arguments_are_refused_by_name() -> None:
    keys, cache, slots = torch.randn(3, 8), torch.zeros(4, 16, 8), torch.tensor([1, 2, 3])
    with pytest.raises(ArgumentError, match="scales is missing"):
        index_write(keys, cache.to(torch.float8_e4m3fn), None, slots)
    with pytest.raises(ArgumentError, match="block_tables has 2 rows, wanted 1 or one for each of 3 tokens"):
        index_scores(
            torch.randn(3, 2, 8), torch.randn(3, 2), cache, None, torch.zeros(2, 4, dtype=torch.int64), slots, 20
        )
    with pytest.raises(ArgumentError, match="longest is 65, and the tables hold 1 to 64 tokens"):
        index_scores(
            torch.randn(3, 2, 8), torch.randn(3, 2), cache, None, torch.zeros(1, 4, dtype=torch.int64), slots, 65
        )
