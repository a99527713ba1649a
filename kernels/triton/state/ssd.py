"""Mamba-2's state space: decodes token by token, prompts by chunks of tokens in tensor cores.

A program has some columns of a head's matrix in registers. In a chunk (arXiv 2405.21060), let G[i] be the sum of the logarithms of the decays up to
token i, S the state before the chunk, and X the inputs times their steps. Then the outputs are exp(G) * C S + P X with
P[i, j] = exp(G[i] - G[j]) * (c[i] . b[j]) for j <= i, and the state after the chunk is the decayed S plus the sum of the b[j] with their inputs,
decayed from their tokens on.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch
from pilotlight.kernels.triton.state.chunks import CHUNK, PRECISIONS, decays_between, softplus

_NUMBERS = 4096  # values of a state per program: 32 for each of its 128 threads
_COLUMNS = 32  # columns of a state per program that computes chunks


@jit(of_batch=("before", "first_runs", "ends", "after"))
def _scan(
    xbc, steps, decay_logs, step_bias, skip, states, out, before, first_runs, ends, after,
    xbc_token, steps_token, state_block, heads, inner, group_size,
    STATE: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_state, in_value = row < STATE, column < VALUE
    place = (head * STATE + row)[:, None] * VALUE + column[None, :]
    inside = in_state[:, None] & in_value[None, :]
    rate, bias, share = -tl.exp(tl.load(decay_logs + head)), tl.load(step_bias + head), tl.load(skip + head)
    run = tl.load(first_runs + sequence)
    token = tl.load(ends + run - 1, mask=run > 0, other=0)
    block = tl.load(before + sequence)
    state = tl.load(states + block * state_block + place, mask=inside & (block >= 0), other=0.0)
    while run < tl.load(first_runs + sequence + 1):
        end = tl.load(ends + run)
        while token < end:
            vectors = xbc + token * xbc_token
            x = tl.load(vectors + head * VALUE + column, mask=in_value, other=0.0).to(tl.float32)
            b = tl.load(vectors + inner + head // SHARED * STATE + row, mask=in_state, other=0.0).to(tl.float32)
            c = tl.load(vectors + inner + group_size + head // SHARED * STATE + row, mask=in_state, other=0.0)
            width = tl.load(steps + token * steps_token + head).to(tl.float32) + bias
            width = softplus(width)
            state = state * tl.exp(rate * width) + b[:, None] * (width * x)[None, :]
            y = tl.sum(state * c.to(tl.float32)[:, None], axis=0) + share * x
            tl.store(out + (token * heads + head) * VALUE + column, y.to(out.dtype.element_ty), mask=in_value)
            token += 1
        target = tl.load(after + run)
        tl.store(states + target * state_block + place, state, mask=inside & (target >= 0))
        run += 1


@jit(of_batch=("before", "first_runs", "ends", "after", "first_sequence"))
def _scan_chunks(
    xbc, steps, decay_logs, step_bias, skip, states, out, before, first_runs, ends, after, first_sequence,
    xbc_token, steps_token, state_block, heads, inner, group_size,
    STATE: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and states of a sequence in some columns of a head's matrix, chunk by chunk."""
    sequence, head = first_sequence + tl.program_id(0), tl.program_id(1)
    i, row, column = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_state, in_value = row < STATE, column < VALUE
    place = (head * STATE + row)[:, None] * VALUE + column[None, :]
    inside = in_state[:, None] & in_value[None, :]
    rate, bias, share = -tl.exp(tl.load(decay_logs + head)), tl.load(step_bias + head), tl.load(skip + head)
    run = tl.load(first_runs + sequence)
    first = tl.load(ends + run - 1, mask=run > 0, other=0)
    block = tl.load(before + sequence)
    state = tl.load(states + block * state_block + place, mask=inside & (block >= 0), other=0.0)
    while run < tl.load(first_runs + sequence + 1):
        end = tl.load(ends + run)
        while first < end:
            token = first + i
            in_chunk = token < end
            in_both, in_rows = in_chunk[:, None] & in_value[None, :], in_chunk[:, None] & in_state[None, :]
            vectors = xbc + token[:, None] * xbc_token
            x = tl.load(vectors + head * VALUE + column[None, :], mask=in_both, other=0.0).to(tl.float32)
            of_group = vectors + inner + head // SHARED * STATE + row[None, :]
            b = tl.load(of_group, mask=in_rows, other=0.0).to(tl.float32)
            c = tl.load(of_group + group_size, mask=in_rows, other=0.0).to(tl.float32)
            width = tl.load(steps + token * steps_token + head, mask=in_chunk, other=0.0).to(tl.float32) + bias
            width = tl.where(in_chunk, softplus(width), 0.0)
            sums = tl.cumsum(rate * width, axis=0)
            given = width[:, None] * x
            seen = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decays_between(sums, i[:, None] >= i[None, :])
            y = tl.exp(sums)[:, None] * tl.dot(c, state, input_precision=PRECISION)
            y += tl.dot(seen, given, input_precision=PRECISION) + share * x
            target = out + (token * heads + head)[:, None] * VALUE + column[None, :]
            tl.store(target, y.to(out.dtype.element_ty), mask=in_both)
            total = tl.min(sums, axis=0)  # of the last token, because logarithms of decays are not positive
            b *= tl.exp(total - sums)[:, None]
            state = state * tl.exp(total) + tl.dot(tl.trans(b), given, input_precision=PRECISION)
            first += TOKENS
        first = end
        target_block = tl.load(after + run)
        tl.store(states + target_block * state_block + place, state, mask=inside & (target_block >= 0))
        run += 1


def ssd(
    xbc: torch.Tensor,
    steps: torch.Tensor,
    decay_logs: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    groups: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Compute ssd of kernels/state/ssd.py."""
    _, heads, size, value = states.shape
    out = torch.empty((xbc.shape[0], heads, value), dtype=xbc.dtype, device=xbc.device)
    rows = triton.next_power_of_2(size)
    columns = max(1, min(triton.next_power_of_2(value), _NUMBERS // rows))
    check_launch("ssd", "states", heads, "heads")
    check_launch("ssd", "states", triton.cdiv(value, columns), f"pieces of {columns} columns")
    sizes = heads, heads * value, groups * size
    num_stepwise = batch.num_stepwise
    if num_stepwise and out.numel():
        _scan[(num_stepwise, heads, triton.cdiv(value, columns))](
            xbc, steps, decay_logs, step_bias, skip, states, out, batch.before, batch.first_runs, batch.ends, batch.after,
            xbc.stride(0), steps.stride(0), states.stride(0), *sizes,
            STATE=size, VALUE=value, SHARED=heads // groups, ROWS=rows, BLOCK=columns, num_warps=4,
        )  # fmt: skip
    if (num_prompts := len(batch.host_ends) - num_stepwise) and out.numel():
        _scan_chunks[(num_prompts, heads, triton.cdiv(value, _COLUMNS))](
            xbc, steps, decay_logs, step_bias, skip, states, out, batch.before, batch.first_runs, batch.ends, batch.after, num_stepwise,
            xbc.stride(0), steps.stride(0), states.stride(0), *sizes,
            STATE=size, VALUE=value, SHARED=heads // groups, ROWS=max(16, rows), BLOCK=_COLUMNS, TOKENS=CHUNK,
            PRECISION=PRECISIONS[xbc.dtype], num_warps=4,
        )  # fmt: skip
    return out
