"""The common parts of recurrent layers that compute prompts by chunks of tokens.

A chunk ends with its run of tokens. Its tokens are computed together by matrix products, with the factors by which a state decays between any two.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit

CHUNK = 64  # tokens
# How tensor cores multiply fp32 numbers: with 11 bits, or in three products of 11 bits each.
PRECISIONS = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "tf32x3"}


@jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def decays_between(sums, is_reached):
    """Return the factors by which a state decays from one token (column) to a later one (row).

    [tokens, tokens], 0 where not `is_reached`; `sums` [tokens]: sums of the logarithms of the decays up to each token.
    """
    return tl.where(is_reached, tl.exp(tl.where(is_reached, sums[:, None] - sums[None, :], 0.0)), 0.0)


def num_chunks(batch: StateBatch, first: int) -> int:
    """Return the most chunks of one sequence, among those from number `first` on."""
    start = batch.host_ends[first - 1][-1] if first else 0
    most = 0
    for ends in batch.host_ends[first:]:
        count = 0
        for end in ends:
            count += triton.cdiv(end - start, CHUNK)
            start = end
        most = max(most, count)
    return most
