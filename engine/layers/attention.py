"""Grouped-query attention over the paged cache: fused projection, rotation, cache write, attention, output
projection."""

from typing import Self

import torch

from pilotlight.engine.description.shapes import AttentionShape, NormKind
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import HeadNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.verify_attention import verify_attention
from pilotlight.kernels.elementwise.qkv import rotate_and_cache


class Attention:
    def __init__(
        self,
        qkv_proj: Linear,
        o_proj: Linear,
        shape: AttentionShape,
        qk_norm: HeadNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.shape = shape
        self.qk_norm = qk_norm
        self.rule = AttentionRule(shape.scale, shape.window, sinks, is_chunked=shape.is_chunked)

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        name: str,
        hidden_size: int,
        shape: AttentionShape,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: NormKind | None = None,
        sinks: bool = False,
        input_size: int | None = None,
    ) -> Self:
        """`input_size`: of what it reads, where that is not what it gives."""
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        heads, kv_heads = loader.shard.heads(shape[:2], name)
        names = [f"{name}.{part}_proj" for part in "qkv"]
        norm_names = [f"{name}.{part}_norm" for part in "qk"]
        return cls(
            Linear.load(
                loader, names, [q_size, kv_size, kv_size], input_size or hidden_size, qkv_bias, "rows", shape.head_dim
            ),
            Linear.load(loader, [f"{name}.o_proj"], [hidden_size], q_size, o_bias, "columns", shape.head_dim),
            shape._replace(num_heads=heads, num_kv_heads=kv_heads),
            qk_norm and HeadNorm.load(loader, norm_names, [heads, kv_heads], shape.head_dim, qk_norm),
            loader.rows([f"{name}.sinks"], [shape.num_heads], split="rows") if sinks else None,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        heads, kv_heads, head_dim = self.shape[:3]
        batch, cache, tokens = context.batch, context.caches[self.shape.layer], x.shape[0]
        qkv = self.qkv_proj(x, context).view(tokens, heads + 2 * kv_heads, head_dim)
        k_cache, v_cache = cache.segments
        group = batch.groups[cache.group]
        rule = self.rule if cache.scales is None else self.rule._replace(kv_scales=cache.scales)
        q = self._keep(qkv, cache, group.slot_mapping, context)
        outputs, decoded = [], batch.num_decoded
        if (decode := group.decode) is not None:
            tables, lens, longest = decode.block_tables, decode.context_lens, decode.max_context_len
            outputs.append(decode_attention(q[:decoded], k_cache, v_cache, tables, lens, longest, rule))
        if group.verify is not None:
            outputs.append(verify_attention(q[:decoded], k_cache, v_cache, group.verify, rule))
        if group.prefill is not None:
            outputs.append(prefill_attention(q[decoded:], k_cache, v_cache, group.prefill, rule))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return context.summed(self.o_proj(attended.reshape(tokens, heads * head_dim), context))

    def _keep(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, context: Context) -> torch.Tensor:
        """Write keys and values of qkv [tokens, heads + 2 * kv_heads, head_dim] to the cache; return the queries as they meet them."""
        assert self.shape.rotary is not None
        norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        (cos, sin), (k_cache, v_cache) = context.turns[self.shape.rotary], cache.segments
        return rotate_and_cache(qkv, norm, eps, cos, sin, k_cache, v_cache, slots, cache.scales)
