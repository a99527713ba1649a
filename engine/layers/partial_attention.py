"""Grouped-query attention of whose heads the first part turns, and the rest is the same at every position."""

import torch

from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.layers.attention import Attention
from pilotlight.kernels.elementwise.kv_write import kv_write
from pilotlight.kernels.elementwise.norm import head_rms_norm
from pilotlight.kernels.elementwise.rotary import rotary


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
