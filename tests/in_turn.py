"""Parameters for sweeps over two axes: every value occurs in the fast tests; pairs that only repeat values are marked slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters; every second pair, as the squares of one colour on a chessboard, is marked slow."""
    others = list(second)
    return [
        pytest.param(one, other, marks=[] if (i + j) % 2 else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(others)
    ]


def swept(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return one pair for each value of `second`, with the values of `first` in rotation; all are marked slow."""
    ones = list(first)
    return [pytest.param(ones[i % len(ones)], other, marks=pytest.mark.slow) for i, other in enumerate(second)]
