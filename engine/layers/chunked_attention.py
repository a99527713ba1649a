"""Llama 4's attention: layers whose queries and keys turn see their own chunk of positions; in the others nothing turns, and queries grow with their
position, so that scores stay as sharp over long contexts (Nakanishi, Scalable-Softmax, arXiv 2501.19399).
"""

import torch

from pilotlight.engine.description.shapes import AttentionShape, NormKind
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.norm import HeadNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.kv_write import kv_write
from pilotlight.kernels.elementwise.norm import head_rms_norm
from pilotlight.kernels.elementwise.rotary import rotary


class ChunkedAttention(Attention):
    @classmethod
    def load_normed(
        cls, loader: WeightLoader, name: str, hidden_size: int, shape: AttentionShape, bias: bool, norm: NormKind | None
    ) -> "ChunkedAttention":
        """Load it with a norm without weights, behind the turn."""
        made = cls.load(loader, name, hidden_size, shape, qkv_bias=bias, o_bias=bias)
        if norm is not None and shape.rotary is not None:
            heads, kv_heads, head_dim = made.shape[:3]
            ones = torch.ones(heads + kv_heads, head_dim, dtype=loader.dtype, device=loader.device)
            made.qk_norm = HeadNorm(ones, norm.eps)
        return made

    def _keep(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, context: Context) -> torch.Tensor:
        heads, kv_heads = self.shape[:2]
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if self.shape.rotary is not None:
            qk = rotary(qk, *context.turns[self.shape.rotary], is_interleaved=True)
        if self.qk_norm is not None:
            qk = head_rms_norm(qk, self.qk_norm.weight, self.qk_norm.eps)
        k_cache, v_cache = cache.segments
        kv_write(qk[:, heads:], v, k_cache, v_cache, slots, cache.scales)
        q = qk[:, :heads]
        if self.shape.rotary is None and context.temperatures is not None:
            q = (q * context.temperatures).to(q.dtype)
        return q
