"""Pooling: cases that are not in the catalogue."""

import pytest
import torch

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.pooling import pool_pieces


def test_a_piece_is_pooled_alike_in_any_company() -> None:
    hidden = torch.randn(100, 33).bfloat16()
    alone = pool_pieces(hidden[10:80], torch.tensor([0, 70], dtype=torch.int32), (70,), "sum")
    together = pool_pieces(hidden, torch.tensor([0, 10, 80, 100], dtype=torch.int32), (10, 70, 20), "sum")
    assert torch.equal(alone[0], together[1])


def test_what_cannot_be_pooled_is_named() -> None:
    hidden, starts = torch.randn(5, 3), torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="pool_pieces: host_lens holds a piece without tokens"):
        pool_pieces(hidden, starts, (5, 0), "sum")
    with pytest.raises(ArgumentError, match="pool_pieces: host_lens add up to 4, and hidden has 5 tokens"):
        pool_pieces(hidden, starts, (2, 2), "last")
    with pytest.raises(ArgumentError, match="pool_pieces: starts has dtype int64"):
        pool_pieces(hidden, starts.long(), (2, 3), "first")
