"""Short causal convolutions.

One program convolves some tokens of a sequence in some channels; another program then stores the sequence's last inputs.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch

_BLOCK, _TILE = 256, 16  # channels and tokens per program; a decode has one token


@jit(of_batch=("before", "first_runs", "ends"))
def _convolve(
    x, weight, bias, states, y, before, first_runs, ends, channels, x_token, state_block,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, channel = tl.program_id(0), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(first_runs + sequence)
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    end = tl.load(ends + tl.load(first_runs + sequence + 1) - 1)
    block = tl.load(before + sequence)
    token = start + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (token < end)[:, None] & (channel < channels)[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        at = token - (WIDTH - 1) + j
        is_new = (at >= start)[:, None]
        new = tl.load(x + at[:, None] * x_token + channel[None, :], mask=inside & is_new, other=0.0)
        place = block * state_block + (at - start + WIDTH - 1)[:, None] * channels + channel[None, :]
        kept = tl.load(states + place, mask=inside & (is_new == 0) & (block >= 0), other=0.0)
        column = tl.load(weight + channel * WIDTH + j, mask=channel < channels, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + kept.to(tl.float32)) * column[None, :]  # one of the two numbers is zero
    if ACTIVATES:
        total = total * tl.sigmoid(total)
    tl.store(y + token[:, None] * channels + channel[None, :], total.to(y.dtype.element_ty), mask=inside)


@jit(of_batch=("before", "first_runs", "ends", "after"))
def _keep(
    x, states, before, first_runs, ends, after, channels, x_token, state_block, BEFORE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    sequence, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    run = tl.load(first_runs + sequence)
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    block = tl.load(before + sequence)
    while run < tl.load(first_runs + sequence + 1):
        end, target = tl.load(ends + run), tl.load(after + run)
        # A row of the new state is copied from the inputs, or from a later row of the previous state. Both states may be in one block, so rows are
        # written in ascending order: a row is read before it is overwritten.
        for j in tl.static_range(BEFORE):
            at = end - BEFORE + j
            new = tl.load(x + at * x_token + channel, mask=inside & (at >= start), other=0.0)
            place = block * state_block + (at - start + BEFORE) * channels + channel
            kept = tl.load(states + place, mask=inside & (at < start) & (block >= 0), other=0.0)
            value = tl.where(at >= start, new, kept)
            tl.store(states + target * state_block + j * channels + channel, value, mask=inside & (target >= 0))
        start, block = end, target
        run += 1


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activates: bool,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Compute short_conv of kernels/state/short_conv.py."""
    channels, width = weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sequences, longest = len(batch.host_ends), batch.longest
    tile = 1 if longest == 1 else _TILE
    tiles, blocks = triton.cdiv(longest, tile), triton.cdiv(channels, _BLOCK)
    check_launch("short_conv", "batch.host_ends", tiles, f"pieces of {tile} tokens")
    check_launch("short_conv", "x", blocks, f"pieces of {_BLOCK} channels")
    if not y.numel():
        return y
    _convolve[(sequences, tiles, blocks)](
        x, weight, weight if bias is None else bias, states, y, batch.before, batch.first_runs, batch.ends, channels, x.stride(0), states.stride(0),
        WIDTH=width, HAS_BIAS=bias is not None, ACTIVATES=activates, TOKENS=tile, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _keep[(sequences, blocks)](
        x, states, batch.before, batch.first_runs, batch.ends, batch.after, channels, x.stride(0), states.stride(0),
        BEFORE=width - 1, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return y
