"""Sweeps over two axes that try each value of either, and mark half of the pairs as slow, since they only repeat the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters, every other one marked slow, as on a chessboard."""
    others = list(second)
    return [
        pytest.param(one, other, marks=[] if (i + j) % 2 else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(others)
    ]


def swept(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return pairs as parameters, each of the second with the ones of the first in turn, all marked slow."""
    ones = list(first)
    return [pytest.param(ones[i % len(ones)], other, marks=pytest.mark.slow) for i, other in enumerate(second)]
