"""Grouped-query attention over the paged cache: fused projection, rotation, cache write, attention, output
projection."""

from typing import NamedTuple

import torch

from engine.batch import Batch
from engine.layers.linear import Linear
from engine.layers.weights import WeightLoader
from kernels.decode_attention import decode_attention
from kernels.kv_write import kv_write
from kernels.prefill_attention import prefill_attention
from kernels.rotary import rotary


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class LayerCache(NamedTuple):
    """One layer's view of the arena: k, v [num_blocks, block_size, num_kv_heads, head_dim], strided between blocks."""

    k: torch.Tensor
    v: torch.Tensor


class Attention:
    def __init__(self, qkv_proj: Linear, o_proj: Linear, shape: AttentionShape) -> None:
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, shape: AttentionShape, bias: bool) -> "Attention":
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        qkv_proj = Linear.load(loader, names, [q_size, kv_size, kv_size], hidden_size, bias)
        return cls(qkv_proj, Linear.load(loader, [f"{name}.o_proj"], [hidden_size], q_size, bias), shape)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        heads, kv_heads, head_dim = self.shape
        tokens = x.shape[0]
        qkv = self.qkv_proj(x).view(tokens, heads + 2 * kv_heads, head_dim)
        qk = rotary(qkv[:, : heads + kv_heads], cos, sin)  # queries and keys turn alike: one call for both
        q, k = qk[:, :heads], qk[:, heads:]
        kv_write(k, qkv[:, heads + kv_heads :], cache.k, cache.v, batch.slot_mapping)
        return self.o_proj(self._attend(q, cache, batch).reshape(tokens, heads * head_dim))

    def _attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        scale = self.shape.head_dim**-0.5
        outputs = []
        if batch.decode is not None:
            decode = batch.decode
            outputs.append(
                decode_attention(
                    q[: batch.num_decodes],
                    cache.k,
                    cache.v,
                    decode.block_tables,
                    decode.context_lens,
                    decode.max_context_len,
                    scale,
                )
            )
        if batch.prefill is not None:
            outputs.append(prefill_attention(q[batch.num_decodes :], cache.k, cache.v, batch.prefill, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
