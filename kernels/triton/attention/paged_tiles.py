"""Attention of a tile of queries to one kv head's paged keys and values, for decode, verify, prefill.

Keys are read a tile at a time, under an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). The scale of scores contains
log2(e), so that a weight is one exp2.
"""

import triton.language as tl

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.fp8_codes import decode_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW, SLIDING, CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the kinds of window of a rule


@jit
def meet(
    queries, position, last_seen, top, total, result,
    k_cache, v_cache, table, kv_head, cache_block, cache_offset, cache_head,
    first, begin, end, scale, cap, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend from queries [ROWS, DIM] at `position` [ROWS] to the keys from begin to end.

    Return top, total, result. Each query sees keys up to `last_seen` [ROWS]. `begin` is a multiple of TILE. Without MASKED every row must see all of
    these keys, and the keys must fill whole tiles. With a window, keys before `first` may belong to another sequence by now and are not read.
    """
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
            seen = at[None, :] <= last_seen[:, None]
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
    """Return the first position that is visible from `position`."""
    return position // window * window if WINDOW == CHUNKED else tl.maximum(position - window + 1, 0)


def window_kind(rule: AttentionRule) -> int:
    kind = NO_WINDOW if rule.window is None else CHUNKED if rule.is_chunked else SLIDING
    return int(kind.value)


@jit
def weigh(scores, factor, top, total, MASKED: tl.constexpr):
    """Return the weights of scores * factor, the factor for earlier weights, the new top and total.

    `factor`, above 0, is applied to a row's largest score and inside the exponent, where it is free: one multiply-add per score instead of a product
    and a difference.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    shift = new_top
    if MASKED:  # a row that has seen no key keeps -inf, and -inf - -inf would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(top - shift)
    return weights, fade, new_top, total * fade + tl.sum(weights, axis=1)


@jit
def load_rows(
    cache, rows, is_key, column, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Load [TILE, DIM]; zeros beyond the keys and beyond HEAD_DIM.

    Only the masks that are needed are applied, because each costs instructions in every tile.
    """
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
    """Return tanh with fp32's relative precision, which differences of scores need.

    Near 0, where 1 - 2 / (exp(2 x) + 1) would lose digits, it uses the polynomial of Cephes' tanhf.
    """
    size = tl.abs(x)
    square = x * x
    near = square * -5.70498872745e-3 + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
