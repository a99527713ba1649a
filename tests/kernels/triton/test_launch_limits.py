"""What no grid can take is refused by name before it is launched."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from kernels.checks import ArgumentError
from kernels.triton import activation, norm
from kernels.triton.decode_attention import decode_attention
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.qkv import rotate_and_cache
from kernels.varlen import VarlenBatch

MANY = 65536


def decode() -> None:
    cache, one = torch.zeros(1, 1, MANY, 1), torch.ones(1, dtype=torch.int64)
    decode_attention(torch.zeros(1, MANY, 1), cache, cache, one[None] * 0, one, 1, 1.0)


def prefill(heads: int, seqs: int) -> None:
    cache = torch.zeros(1, 1, heads, 1)
    starts, lens = torch.arange(seqs + 1).int(), torch.ones(seqs).int()
    batch = VarlenBatch(torch.zeros(seqs, 1).long(), starts, lens, (1,) * seqs, (1,) * seqs)
    prefill_attention(torch.zeros(seqs, heads, 1), cache, cache, batch, 1.0)


def rotate() -> None:
    cache, angle = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1)
    rotate_and_cache(torch.zeros(1, MANY, 2), None, 0.0, angle, angle, cache, cache, torch.zeros(1).long())


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda: norm.rms_norm(torch.zeros(1, MANY + 1), torch.zeros(MANY + 1), 0.1), "rms_norm: x has 65537 columns"),
        (lambda: norm.head_rms_norm(torch.zeros(1, MANY, 1), torch.zeros(MANY, 1), 0.1), "head_rms_norm: x has 65536 heads"),
        (lambda: activation.silu_and_mul(torch.zeros(1, 1).expand(1, 2 * 1024 * MANY)), "gated activation: x has 65536 pieces of 1024 columns"),
        (decode, "decode_attention: q has 65536 heads"),
        (lambda: prefill(MANY, 1), "prefill_attention: q has 65536 heads"),
        (lambda: prefill(1, MANY), "prefill_attention: batch has 65536 sequences"),
        (rotate, "rotate_and_cache: qkv has 65536 heads"),
    ],
)  # fmt: skip
def test_more_than_a_grid_takes_is_refused(launch: Callable[[], None], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}, and a launch takes at most 6553"):
        launch()
