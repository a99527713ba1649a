"""Latent attention of prompts in expanded form, with keys and values made from latent vectors.

Each pair of a query and a key costs less than in absorbed form: products as wide as a head, not as a latent vector. In return every visible latent
vector is multiplied to make keys and values. `is_cheaper` decides which form takes fewer products.
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import EXPANDED_BYTES, LatentShape
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.selected_rows import rows_of
from pilotlight.kernels.attention.varlen import VarlenBatch


def is_cheaper(batch: VarlenBatch, block_size: int, item_bytes: int, shape: LatentShape) -> bool:
    """True if the expanded form takes fewer products than the absorbed form, and not too much memory.

    `block_size`: tokens of a block; `item_bytes`: bytes of a number of queries, keys and values.

    That is so for a prompt's first chunk, and after a prefix for chunks of some 200 tokens or more at DeepSeek-V3's sizes.
    """
    projected, width = (shape.key + shape.value) * shape.latent, _width(shape)
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(batch.host_q_lens, batch.host_context_lens, strict=True))
    num_made = batch.block_tables.numel() * block_size
    if num_made * shape.num_heads * 2 * width * item_bytes > EXPANDED_BYTES:
        return False
    absorbed = sum(batch.host_q_lens) * projected + pairs * (2 * shape.latent + shape.rotary)
    return num_made * projected + pairs * 2 * width < absorbed


def attend(
    q_key: torch.Tensor,
    q_rotary: torch.Tensor,
    up_proj: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    shape: LatentShape,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from prompt chunks; return [tokens, heads, value].

    q_key [tokens, heads, key], q_rotary [tokens, heads, rotary]; up_proj [heads, key + value, latent]; cache [num_blocks, block_size, latent +
    rotary]; cache_scale [1]: the scale of a cache in FP8.
    """
    tables = batch.block_tables
    vectors = rows_of(cache, (tables.flatten(),), cache_scale, q_key.dtype)
    keys, values = _keys_and_values(vectors, up_proj, shape)
    in_order = batch._replace(block_tables=torch.arange(tables.numel(), device=tables.device).view_as(tables))
    q = F.pad(torch.cat((q_key, q_rotary), dim=2), (0, _width(shape) - shape.query))
    return prefill_attention(q, keys, values, in_order, AttentionRule(shape.scale))[..., : shape.value]


def _keys_and_values(
    vectors: torch.Tensor, up_proj: torch.Tensor, shape: LatentShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make keys and values [blocks, block_size, heads, width] of [blocks, block_size, latent + rotary]."""
    made = torch.unflatten(F.linear(vectors[..., : shape.latent], up_proj.flatten(0, 1)), 2, up_proj.shape[:2])
    both = made.new_empty((*made.shape[:3], 2, _width(shape)))
    keys, values = both.unbind(3)
    keys[..., : shape.key] = made[..., : shape.key]
    keys[..., shape.key : shape.query] = vectors[:, :, None, shape.latent :]
    keys[..., shape.query :] = 0.0
    values[..., : shape.value] = made[..., shape.key :]
    values[..., shape.value :] = 0.0
    return keys, values


def _width(shape: LatentShape) -> int:
    """Return the padded width of keys and values, which the operation requires to be equal."""
    return max(shape.query, shape.value)
