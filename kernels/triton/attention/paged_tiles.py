"""A tile of queries meets the paged keys and values of one kv head, a tile at a time, under a softmax that is corrected as it goes (Milakov and
Gimelshein, 2018; FlashAttention, Dao et al., 2022): what decode, verify and prefill attention share.

Scores are kept in powers of two: their scale carries log2(e), so that a weight is one exp2.
"""

import triton.language as tl

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import decode_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW, SLIDING, CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a rule's window is


@jit
def meet(
    queries, position, top, total, result,
    k_cache, v_cache, table, kv_head, cache_block, cache_offset, cache_head,
    first, begin, end, scale, cap, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """queries [ROWS, DIM] at `position` [ROWS] meet the keys from begin (a multiple of TILE) to end; without MASKED every row must see all of
    them, and they must fill their tiles. What lies before `first`, with a window, may be another's by now: it is not read. -> top, total, result"""
    column, key = tl.arange(0, DIM), tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        at = start + key
        is_key = at < end
        if MASKED and WINDOW != NO_WINDOW:
            is_key = is_key & (at >= first)
        block = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0) if MASKED else tl.load(table + at // BLOCK_SIZE)
        place = block.to(tl.int64) * cache_block + at % BLOCK_SIZE * cache_offset + kv_head * cache_head
        rows = place[:, None] + column[None, :]
        keys = load_rows(k_cache, rows, is_key, column, HEAD_DIM, DIM, MASKED)
        if FP8:
            keys = decode_fp8(keys, FP8)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        factor = scale
        if HAS_CAP:
            scores = tanh(scores * scale)
            factor = cap
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW != NO_WINDOW:
                seen = seen & (at[None, :] >= first_seen(position, window, WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        values = load_rows(v_cache, rows, is_key, column, HEAD_DIM, DIM, MASKED)
        if FP8:
            values = decode_fp8(values, FP8)
        weights, fade, top, total = weigh(scores, factor, top, total, MASKED)
        result = tl.dot(
            weights.to(queries.dtype), values.to(queries.dtype), result * fade[:, None], input_precision="ieee"
        )
    return top, total, result


@jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """-> the first position that is seen from another one"""
    return position // window * window if WINDOW == CHUNKED else tl.maximum(position - window + 1, 0)


def window_kind(rule: AttentionRule) -> int:
    kind = NO_WINDOW if rule.window is None else CHUNKED if rule.is_chunked else SLIDING
    return int(kind.value)


@jit
def weigh(scores, factor, top, total, MASKED: tl.constexpr):
    """-> the weights of scores * factor, what earlier weights are worth now, and the new top and total. The factor, above 0, is applied to a row's
    largest and inside the exponent, where it costs nothing: a multiply-add for each score instead of a product and a difference."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    shift = new_top
    if MASKED:  # a row that has seen nothing keeps -inf, and -inf - -inf would be no number
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(top - shift)
    return weights, fade, new_top, total * fade + tl.sum(weights, axis=1)


@jit
def load_rows(
    cache, rows, is_key, column, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """[TILE, DIM]; zeros beyond the keys and beyond HEAD_DIM. Only the masks that are needed: each costs instructions in every tile."""
    if MASKED and HEAD_DIM < DIM:
        loaded = tl.load(cache + rows, mask=is_key[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        loaded = tl.load(cache + rows, mask=is_key[:, None], other=0.0)
    elif HEAD_DIM < DIM:
        loaded = tl.load(cache + rows, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(cache + rows)
    return loaded


@jit
def tanh(x):
    """To fp32's precision relative to itself, which a score's distance from others needs: near 0, where 1 - 2 / (exp(2 x) + 1) cancels, by the
    polynomial of Cephes' tanhf."""
    size = tl.abs(x)
    square = x * x
    near = square * -5.70498872745e-3 + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
