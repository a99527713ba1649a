"""Mamba-2's state space, token by token: a program has some columns of a head's matrix in registers.

This suits decodes. Prompts are also computed in this way, which is correct but slower than chunks in tensor cores would be.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch

_NUMBERS = 4096  # values of a state per program: 32 for each of its 128 threads


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
            width = tl.where(width > 20.0, width, tl.log(1.0 + tl.exp(tl.minimum(width, 20.0))))
            state = state * tl.exp(rate * width) + b[:, None] * (width * x)[None, :]
            y = tl.sum(state * c.to(tl.float32)[:, None], axis=0) + share * x
            tl.store(out + (token * heads + head) * VALUE + column, y.to(out.dtype.element_ty), mask=in_value)
            token += 1
        target = tl.load(after + run)
        tl.store(states + target * state_block + place, state, mask=inside & (target >= 0))
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
    if out.numel():
        _scan[(len(batch.host_ends), heads, triton.cdiv(value, columns))](
            xbc, steps, decay_logs, step_bias, skip, states, out, batch.before, batch.first_runs, batch.ends, batch.after,
            xbc.stride(0), steps.stride(0), states.stride(0), heads, heads * value, groups * size,
            STATE=size, VALUE=value, SHARED=heads // groups, ROWS=rows, BLOCK=columns, num_warps=4,
        )  # fmt: skip
    return out
