"""The gated delta rule: decodes token by token, prompts by chunks of tokens in tensor cores.

Token by token, a program has some columns of a head's matrix in registers. Prompts with a decay for each row of a state are computed so, too.

In a chunk (arXiv 2412.06464), let G[i] be the sum of the logarithms of the decays up to token i, S the state before the chunk, and
L[i, j] = step[i] * exp(G[i] - G[j]) * (k[i] . k[j]) for j < i. The corrections D of all its tokens solve

    (I + L) D = step * (V - exp(G) * K S)

and then the outputs are exp(G) * Q S + P D with P[i, j] = exp(G[i] - G[j]) * (q[i] . k[j]) for j <= i. The state after the chunk is the decayed S
plus the sum of the k[j] with their corrections, decayed from their tokens on. One launch inverts I + L for all chunks, the next one passes the states
from chunk to chunk.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.state.delta_rule import EPS
from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch
from pilotlight.kernels.triton.state.chunks import CHUNK, PRECISIONS, decays_between, num_chunks, softplus

_NUMBERS = 4096  # values of a state per program: 32 for each of its 128 threads
_COLUMNS = 32  # columns of a state per program that computes chunks


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
            state *= tl.exp(rate * softplus(width))[:, None]
            step = tl.sigmoid(tl.load(steps + token * steps_token + head).to(tl.float32))
            change = step * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * change[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(out + (token * heads + head) * VALUE + column, o.to(out.dtype.element_ty), mask=in_value)
            token += 1
        target = tl.load(after + run)
        tl.store(states + target * state_block + place, state, mask=inside & (target >= 0))
        run += 1


@jit
def _unit(x, token, row, x_token, in_chunk, KEY: tl.constexpr, eps):
    """Load keys or queries of a chunk, [tokens, rows], and divide each by its length."""
    inside = in_chunk[:, None] & (row < KEY)[None, :]
    vectors = tl.load(x + token[:, None] * x_token + row[None, :], mask=inside, other=0.0).to(tl.float32)
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, axis=1) + eps)[:, None]


@jit
def _sums(decays, token, in_chunk, decays_token, rate, bias):
    """Return the sums [tokens] of the logarithms of the decays up to each token of a chunk."""
    width = tl.load(decays + token * decays_token, mask=in_chunk, other=0.0).to(tl.float32) + bias
    return tl.cumsum(tl.where(in_chunk, rate * softplus(width), 0.0), axis=0)


@jit(of_batch=("first_runs", "ends", "first_sequence"))
def _invert(
    k, steps, decays, decay_logs, decay_bias, inverse, first_runs, ends, first_sequence,
    k_token, steps_token, decays_token, heads, eps,
    KEY: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the rows [TOKENS] of the inverse of I + L for each token and head."""
    sequence, chunk, head = first_sequence + tl.program_id(1), tl.program_id(0), tl.program_id(2)
    run, end_run = tl.load(first_runs + sequence), tl.load(first_runs + sequence + 1)
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    end = tl.load(ends + run)
    while (run < end_run) & (chunk >= tl.cdiv(end - start, TOKENS)):
        chunk -= tl.cdiv(end - start, TOKENS).to(tl.int32)
        start = end
        run += 1
        end = tl.load(ends + run, mask=run < end_run, other=0)
    if run < end_run:
        i, row = tl.arange(0, TOKENS), tl.arange(0, ROWS)
        token = start + chunk * TOKENS + i
        in_chunk = token < end
        keys = _unit(k + head // SHARED * KEY, token, row, k_token, in_chunk, KEY, eps)
        rate, bias = -tl.exp(tl.load(decay_logs + head)), tl.load(decay_bias + head)
        sums = _sums(decays + head, token, in_chunk, decays_token, rate, bias)
        step = tl.sigmoid(tl.load(steps + token * steps_token + head, mask=in_chunk, other=0.0).to(tl.float32))
        lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * step[:, None]
        lower *= decays_between(sums, i[:, None] > i[None, :])
        solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for number in range(1, TOKENS):  # forward substitution: a row of the inverse follows from the rows before it
            factors = tl.sum(tl.where(i[:, None] == number, lower, 0.0), axis=0)
            found = tl.sum(factors[:, None] * solved, axis=0)
            solved -= tl.where(i[:, None] == number, found[None, :], 0.0)
        place = (token * heads + head) * TOKENS
        tl.store(inverse + place[:, None] + i[None, :], solved, mask=in_chunk[:, None])


@jit(of_batch=("before", "first_runs", "ends", "after", "first_sequence"))
def _advance(
    qkv, steps, decays, decay_logs, decay_bias, inverse, states, out, before, first_runs, ends, after, first_sequence,
    qkv_token, steps_token, decays_token, state_block, heads, key_size, eps, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and states of a sequence in some columns of a head's matrix, chunk by chunk."""
    sequence, head = first_sequence + tl.program_id(0), tl.program_id(1)
    i, row, column = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = (head * KEY + row)[:, None] * VALUE + column[None, :]
    inside = (row < KEY)[:, None] & (column < VALUE)[None, :]
    rate, bias = -tl.exp(tl.load(decay_logs + head)), tl.load(decay_bias + head)
    q, k = qkv + head // SHARED * KEY, qkv + key_size + head // SHARED * KEY
    run = tl.load(first_runs + sequence)
    first = tl.load(ends + run - 1, mask=run > 0, other=0)
    block = tl.load(before + sequence)
    state = tl.load(states + block * state_block + place, mask=inside & (block >= 0), other=0.0)
    while run < tl.load(first_runs + sequence + 1):
        end = tl.load(ends + run)
        while first < end:
            token = first + i
            in_chunk = token < end
            in_both = in_chunk[:, None] & (column < VALUE)[None, :]
            sums = _sums(decays + head, token, in_chunk, decays_token, rate, bias)
            step = tl.sigmoid(tl.load(steps + token * steps_token + head, mask=in_chunk, other=0.0).to(tl.float32))
            grown = tl.exp(sums)[:, None]
            keys = _unit(k, token, row, qkv_token, in_chunk, KEY, eps)
            values = qkv + token[:, None] * qkv_token + 2 * key_size + head * VALUE + column[None, :]
            rest = tl.load(values, mask=in_both, other=0.0).to(tl.float32)
            rest = step[:, None] * (rest - grown * tl.dot(keys, state, input_precision=PRECISION))
            solved = tl.load(
                inverse + ((token * heads + head) * TOKENS)[:, None] + i[None, :], mask=in_chunk[:, None], other=0.0
            )
            change = tl.dot(solved, rest, input_precision=PRECISION)
            queries = _unit(q, token, row, qkv_token, in_chunk, KEY, eps) * scale
            seen = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            seen *= decays_between(sums, i[:, None] >= i[None, :])
            o = grown * tl.dot(queries, state, input_precision=PRECISION)
            o += tl.dot(seen, change, input_precision=PRECISION)
            target = out + (token * heads + head)[:, None] * VALUE + column[None, :]
            tl.store(target, o.to(out.dtype.element_ty), mask=in_both)
            total = tl.min(sums, axis=0)  # of the last token, because logarithms of decays are not positive
            keys *= tl.exp(total - sums)[:, None]
            state = state * tl.exp(total) + tl.dot(tl.trans(keys), change, input_precision=PRECISION)
            first += TOKENS
        first = end
        target_block = tl.load(after + run)
        tl.store(states + target_block * state_block + place, state, mask=inside & (target_block >= 0))
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
    by_row = decays.shape[1] != heads
    num_stepwise = len(batch.host_ends) if by_row else batch.num_stepwise
    if num_stepwise and out.numel():
        _apply[(num_stepwise, heads, triton.cdiv(value, columns))](
            qkv, steps, decays, decay_logs, decay_bias, states, out, batch.before, batch.first_runs, batch.ends, batch.after,
            qkv.stride(0), steps.stride(0), decays.stride(0), states.stride(0), heads, key_heads * key, EPS, key**-0.5,
            BY_ROW=by_row, KEY=key, VALUE=value, SHARED=heads // key_heads, ROWS=rows, BLOCK=columns, num_warps=4,
        )  # fmt: skip
    if (num_prompts := len(batch.host_ends) - num_stepwise) and out.numel():
        chunks, key_size = num_chunks(batch, num_stepwise), key_heads * key
        check_launch("gated_delta_rule", "batch.host_ends", num_prompts, "prompts")
        inverse = torch.empty((qkv.shape[0], heads, CHUNK), dtype=torch.float32, device=qkv.device)
        shape: dict[str, int | str] = {
            "KEY": key, "SHARED": heads // key_heads, "ROWS": max(16, rows), "TOKENS": CHUNK, "PRECISION": PRECISIONS[qkv.dtype],
        }  # fmt: skip
        _invert[(chunks, num_prompts, heads)](
            qkv[:, key_size:], steps, decays, decay_logs, decay_bias, inverse, batch.first_runs, batch.ends, num_stepwise,
            qkv.stride(0), steps.stride(0), decays.stride(0), heads, EPS, **shape, num_warps=4,
        )  # fmt: skip
        _advance[(num_prompts, heads, triton.cdiv(value, _COLUMNS))](
            qkv, steps, decays, decay_logs, decay_bias, inverse, states, out, batch.before, batch.first_runs, batch.ends, batch.after,
            num_stepwise, qkv.stride(0), steps.stride(0), decays.stride(0), states.stride(0), heads, key_size, EPS, key**-0.5,
            VALUE=value, BLOCK=_COLUMNS, **shape, num_warps=4,
        )  # fmt: skip
    return out
