"""Latent attention of prompts before anything is absorbed: keys and values of all heads are made of the latent vectors, for the time of one step.

A pair of a query and a key then costs a head's width twice, instead of the latent vector's; making them costs a product for every vector that is
seen. Knows which way takes fewer products; refuses to know where queries come from.
"""

import torch
import torch.nn.functional as F

from engine.description.shapes import LatentShape
from kernels.attention_rule import AttentionRule
from kernels.prefill_attention import prefill_attention
from kernels.varlen import VarlenBatch

# Keys and values that are there at once; where a context has more of them, a part of the heads follows the other. 256k tokens of one head of
# DeepSeek-V3's are 201 MB in bf16.
_MOST_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20, "meta": 512 << 20}


def is_cheaper(batch: VarlenBatch, block_size: int, shape: LatentShape) -> bool:
    """Tell whether this takes fewer products than the absorbed form: for the first chunk of a prompt, and behind a long prefix for chunks of some 200
    tokens or more at DeepSeek-V3's sizes."""
    projected = (shape.key + shape.value) * shape.latent
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(batch.host_q_lens, batch.host_context_lens, strict=True))
    num_made = batch.block_tables.numel() * block_size
    made = num_made * projected + pairs * 2 * _width(shape)
    absorbed = sum(batch.host_q_lens) * projected + pairs * (2 * shape.latent + shape.rotary)
    return made < absorbed


def attend(
    q_key: torch.Tensor,
    q_rotary: torch.Tensor,
    up_proj: torch.Tensor,
    cache: torch.Tensor,
    batch: VarlenBatch,
    shape: LatentShape,
) -> torch.Tensor:
    """q_key [tokens, heads, key], q_rotary [tokens, heads, rotary]; up_proj [heads, key + value, latent]; cache [num_blocks, block_size, latent +
    rotary] -> [tokens, heads, value]"""
    tables, width = batch.block_tables, _width(shape)
    vectors = cache.index_select(0, tables.flatten())
    in_order = torch.arange(tables.numel(), device=tables.device).view_as(tables)
    batch, rule = batch._replace(block_tables=in_order), AttentionRule(shape.scale)
    q = F.pad(torch.cat((q_key, q_rotary), dim=2), (0, width - shape.query))
    bytes_per_head = 2 * width * vectors.shape[0] * vectors.shape[1] * q.element_size()
    heads = max(1, _MOST_BYTES[q.device.type] // max(1, bytes_per_head))
    parts = []
    for some_q, some_up in zip(torch.split(q, heads, dim=1), torch.split(up_proj, heads), strict=True):
        keys, values = _keys_and_values(vectors, some_up, shape)
        parts.append(prefill_attention(some_q, keys, values, batch, rule)[..., : shape.value])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _keys_and_values(
    vectors: torch.Tensor, up_proj: torch.Tensor, shape: LatentShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors [blocks, block_size, latent + rotary] -> keys and values, each [blocks, block_size, heads, width]"""
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
    """What keys and values are padded to, as the operation wants them alike."""
    return max(shape.query, shape.value)
