"""Calls that are too large for a grid are refused, with the argument's name, before the launch."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.triton.elementwise import activation, norm

MANY = 65536


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda: norm.rms_norm(torch.zeros(1, MANY + 1), torch.zeros(MANY + 1), 0.1), "rms_norm: x has 65537 columns"),
        (lambda: norm.head_rms_norm(torch.zeros(1, MANY, 1), torch.zeros(MANY, 1), 0.1), "head_rms_norm: x has 65536 heads"),
        (lambda: activation.silu_and_mul(torch.zeros(1, 1).expand(1, 2 * 1024 * MANY)), "gated activation: x has 65536 pieces of 1024 columns"),
    ],
)  # fmt: skip
def test_more_than_a_grid_takes_is_refused(launch: Callable[[], None], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}, and a launch takes at most 6553"):
        launch()
