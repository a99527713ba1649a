"""The gated delta rule, token by token: a program has some columns of a head's matrix in registers.

This suits decodes. Prompts are also computed in this way, which is correct but slower than chunks in tensor cores would be.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.delta_rule import EPS
from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch

_NUMBERS = 4096  # values of a state per program: 32 for each of its 128 threads


@jit(of_batch=("before", "first_runs", "ends", "after"))
def _apply(
    qkv, steps, decays, decay_logs, decay_bias, states, out, before, first_runs, ends, after,
    qkv_token, steps_token, decays_token, state_block, heads, key_size, eps, scale,
    BY_ROW: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_value = row < KEY, column < VALUE
    place = (head * KEY + row)[:, None] * VALUE + column[None, :]
    inside = in_key[:, None] & in_value[None, :]
    rate, decay_at = -tl.exp(tl.load(decay_logs + head)), head * KEY + row if BY_ROW else head + row * 0
    bias = tl.load(decay_bias + decay_at, mask=in_key, other=0.0)
    run = tl.load(first_runs + sequence)
    token = tl.load(ends + run - 1, mask=run > 0, other=0)
    block = tl.load(before + sequence)
    state = tl.load(states + block * state_block + place, mask=inside & (block >= 0), other=0.0)
    while run < tl.load(first_runs + sequence + 1):
        end = tl.load(ends + run)
        while token < end:
            vectors = qkv + token * qkv_token
            q = tl.load(vectors + head // SHARED * KEY + row, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(vectors + key_size + head // SHARED * KEY + row, mask=in_key, other=0.0).to(tl.float32)
            v = tl.load(vectors + 2 * key_size + head * VALUE + column, mask=in_value, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
            width = tl.load(decays + token * decays_token + decay_at, mask=in_key, other=0.0).to(tl.float32) + bias
            width = tl.where(width > 20.0, width, tl.log(1.0 + tl.exp(tl.minimum(width, 20.0))))
            state *= tl.exp(rate * width)[:, None]
            step = tl.sigmoid(tl.load(steps + token * steps_token + head).to(tl.float32))
            change = step * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * change[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(out + (token * heads + head) * VALUE + column, o.to(out.dtype.element_ty), mask=in_value)
            token += 1
        target = tl.load(after + run)
        tl.store(states + target * state_block + place, state, mask=inside & (target >= 0))
        run += 1


def gated_delta_rule(
    qkv: torch.Tensor,
    steps: torch.Tensor,
    decays: torch.Tensor,
    decay_logs: torch.Tensor,
    decay_bias: torch.Tensor,
    key_heads: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Compute gated_delta_rule of kernels/state/delta_rule.py."""
    _, heads, key, value = states.shape
    out = torch.empty((qkv.shape[0], heads, value), dtype=qkv.dtype, device=qkv.device)
    rows = triton.next_power_of_2(key)
    columns = max(1, min(triton.next_power_of_2(value), _NUMBERS // rows))
    check_launch("gated_delta_rule", "states", heads, "heads")
    check_launch("gated_delta_rule", "states", triton.cdiv(value, columns), f"pieces of {columns} columns")
    if out.numel():
        _apply[(len(batch.host_ends), heads, triton.cdiv(value, columns))](
            qkv, steps, decays, decay_logs, decay_bias, states, out, batch.before, batch.first_runs, batch.ends, batch.after,
            qkv.stride(0), steps.stride(0), decays.stride(0), states.stride(0), heads, key_heads * key, EPS, key**-0.5,
            BY_ROW=decays.shape[1] != heads, KEY=key, VALUE=value, SHARED=heads // key_heads, ROWS=rows, BLOCK=columns, num_warps=4,
        )  # fmt: skip
    return out
