"""The index of keys of sparse attention, with scores and selected positions.

A layer caches one small key per token for its index. A token's score of an earlier token is the sum over the index's heads of weight * max(0, query .
key), and attention then reads only the tokens with the largest scores (section 2.1 of the report on DeepSeek-V3.2-Exp). Keys have the cache's type,
or are in FP8 with one scale per key.
"""

import torch

from pilotlight.kernels.attention.fp8_cache import FP8, LARGEST, LEAST_SIZE, quantize
from pilotlight.kernels.attention.paged import check_blocks, check_slots, require_tables_of_tokens
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation

# Limit in bytes of the products of queries and keys in memory at once: 64 heads over 32k keys take 8 MB per token.
_PRODUCT_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def _check_write(
    check: ArgumentCheck,
    keys: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    check.tensor("keys", keys, "tokens dim", dense=1)
    _require_cache(check, cache, scales, keys.dtype)
    check.tensor("slot_mapping", slot_mapping, "tokens", (torch.int64,), dense=1)
    check_slots(check, slot_mapping, cache)


def _require_cache(check: ArgumentCheck, cache: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> None:
    check.require("scales", scales is not None or cache.dtype != FP8, "is missing: keys in FP8 have one scale each")
    check.tensor("cache", cache, "blocks block_size dim", (dtype if scales is None else FP8,), dense=1)
    if scales is not None:
        check.tensor("scales", scales, "blocks block_size", (torch.float32,))


def _check_scores(
    check: ArgumentCheck,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    visible: torch.Tensor,
    longest: int,
) -> None:
    check.tensor("q", q, "tokens heads dim", dense=1)
    check.tensor("weights", weights, "tokens heads", (torch.float32,), dense=1)
    _require_cache(check, cache, scales, q.dtype)
    require_tables_of_tokens(check, block_tables, q.shape[0])
    check.tensor("visible", visible, "tokens", (torch.int64,), dense=1)
    room = block_tables.shape[1] * cache.shape[1]
    fits = 0 < longest <= room or not q.shape[0]
    check.require("longest", fits, f"is {longest}, and the tables hold 1 to {room} tokens")
    check_blocks(check, block_tables, visible, cache)


@operation(_check_write, triton="attention.key_index")
def index_write(
    keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    """Write keys to their slots.

    keys [tokens, dim]; cache [num_blocks, block_size, dim]; scales [num_blocks, block_size] fp32 if the cache is in FP8; slot_mapping [tokens] int64.
    """
    block_size = cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    if scales is None:
        cache[blocks, offsets] = keys
        return
    largest = keys.float().abs().amax(1).clamp_(min=LEAST_SIZE) / LARGEST
    scales[blocks, offsets] = largest
    # torch can index bytes but not FP8 tensors
    cache.view(torch.uint8)[blocks, offsets] = quantize(keys, largest.unsqueeze(1)).view(torch.uint8)


@operation(_check_scores, triton="attention.key_index")
def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    visible: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Return the score of each key for each token, [tokens, longest] fp32; 0 for unseen keys.

    q [tokens, heads, dim]; weights [tokens, heads] fp32; cache and scales as in index_write; block_tables [tokens, max_blocks] int64, or one row if
    all tokens are of one sequence; visible [tokens] int64: a token sees so many first keys; longest: the most of them, or a limit of them.
    """
    tokens, heads, _ = q.shape
    at_once = max(1, _PRODUCT_BYTES[q.device.type] // (4 * heads * longest))
    scores = q.new_empty((tokens, longest), dtype=torch.float32)
    blocks = -(-longest // cache.shape[1])
    for first in range(0, tokens, at_once):
        rows = slice(first, first + at_once)
        queries = q[rows].float()
        if block_tables.shape[0] == 1:
            keys = _widened(cache, scales, block_tables[:, :blocks])[0, :longest]
            products = torch.unflatten(queries.flatten(0, 1) @ keys.T, 0, queries.shape[:2])
        else:
            keys = _widened(cache, scales, block_tables[rows, :blocks])[:, :longest]
            products = torch.bmm(queries, keys.transpose(1, 2))
        scores[rows] = torch.bmm(weights[rows].unsqueeze(1), products.relu_()).squeeze(1)
    return scores.masked_fill_(torch.arange(longest, device=q.device) >= visible.unsqueeze(1), 0.0)


def _widened(cache: torch.Tensor, scales: torch.Tensor | None, tables: torch.Tensor) -> torch.Tensor:
    """Return the keys of tables [rows, blocks] in fp32: [rows, blocks * block_size, dim]."""
    if scales is None:
        return cache[tables].flatten(1, 2).float()
    codes = cache.view(torch.uint8)[tables].view(FP8)
    return (codes.float() * scales[tables].unsqueeze(-1)).flatten(1, 2)


def select_keys(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the positions of the largest scores in ascending order, [tokens, top_k] int64.

    scores [tokens, longest] with top_k <= longest; visible as in index_scores. Of equal scores the first are selected. If a token sees fewer than
    top_k keys, all of them come first.
    """
    at = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(at >= visible.unsqueeze(1), -torch.inf)
    least = scores.topk(top_k, sorted=False).values.amin(1, keepdim=True)
    is_above, is_equal = scores > least, scores == least
    is_selected = is_above | (is_equal & (is_equal.cumsum(1) <= top_k - is_above.sum(1, keepdim=True)))
    places = torch.where(
        is_selected, is_selected.cumsum(1) - 1, top_k
    )  # all others share the last column, which is cut off
    positions = scores.new_zeros((scores.shape[0], top_k + 1), dtype=torch.int64)
    return positions.scatter_(1, places, at.expand_as(places))[:, :top_k]
