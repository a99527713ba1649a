"""Grouped-query attention of whose heads the first part turns, and the rest is the same at every position."""

import torch

from engine.context import Context
from engine.kv.layout import LayerCache
from engine.layers.attention import Attention
from kernels.kv_write import kv_write
from kernels.norm import head_rms_norm
from kernels.rotary import rotary


class PartialAttention(Attention):
    def _keep(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, context: Context) -> torch.Tensor:
        assert self.shape.rotary is not None
        heads, kv_heads, head_dim = self.shape[:3]
        cos, sin = context.turns[self.shape.rotary]
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if self.qk_norm is not None:
            qk = head_rms_norm(qk, self.qk_norm.weight, self.qk_norm.eps)
        turning, passing = torch.split(qk, [2 * cos.shape[1], head_dim - 2 * cos.shape[1]], dim=2)
        qk = torch.cat((rotary(turning, cos, sin), passing), dim=2)
        k_cache, v_cache = cache.segments
        kv_write(qk[:, heads:], v, k_cache, v_cache, slots, cache.scales)
        return qk[:, :heads]
