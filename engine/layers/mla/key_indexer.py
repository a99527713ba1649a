"""The index of a layer of latent attention, which selects the keys that each token reads.

It has separate queries, projected from the layer's reduced queries, and one key per token (section 2.1 of the report on DeepSeek-V3.2-Exp). Names of
tensors: model.safetensors.index.json of deepseek-ai/DeepSeek-V3.2-Exp. Every rank computes the whole index, so that all of them select the same keys.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import IndexShape, LatentShape
from pilotlight.engine.execution.batch import DecodeBatch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mla.readers import longest_context, readers_of
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.attention.key_index import index_scores, index_write, select_keys
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.elementwise.rotary import rotary

_EPS = 1e-6  # of the norm of keys, in the published code

Parts = Sequence[tuple[slice, DecodeBatch | VarlenBatch]]  # the tokens of a step that are computed together


class KeyIndexer:
    def __init__(
        self, q_proj: Linear, k_proj: Linear, k_norm: LayerNorm, weights_proj: Linear, shape: IndexShape, turning: int
    ) -> None:
        """Make an index.

        `weights_proj`: the projection of hidden states to the weights of heads, in fp32; `turning`: number of rotated values of a head.
        """
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.k_norm = k_norm
        self.weights_proj = weights_proj
        self.shape = shape
        self.turning = turning

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, shape: LatentShape) -> "KeyIndexer":
        """Load the index of the layer whose tensor names start with `name`."""
        index, rank = shape.key_index, shape.query_rank
        assert index is not None
        assert rank is not None, "config.json was refused"
        wide = loader.with_dtype(torch.float32)
        return cls(
            Linear.load(loader, [f"{name}.wq_b"], [index.num_heads * index.head_dim], rank, bias=False),
            Linear.load(loader, [f"{name}.wk"], [index.head_dim], hidden_size, bias=False),
            LayerNorm.load(loader, f"{name}.k_norm", index.head_dim, _EPS),
            Linear.load(wide, [f"{name}.weights_proj"], [index.num_heads], hidden_size, bias=False),
            index,
            shape.rotary,
        )

    def __call__(
        self,
        x: torch.Tensor,
        reduced: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        kept: LayerCache,
        parts: Parts,
        context: Context,
    ) -> list[torch.Tensor | None]:
        """Write the keys of the step's tokens, and select the keys that each part of the step reads.

        Return for each part their positions [tokens, top_k] int64, or None if it reads all. x [tokens, hidden]; reduced [tokens, query_rank]; turns:
        cos, sin [tokens, pairs].
        """
        latent, index, *further = kept.segments  # in FP8 the scales of the index's keys come last
        cache, scales = index.squeeze(2), further[0].squeeze(3).squeeze(2) if further else None
        keys = self._turned(self.k_norm(self.k_proj(x, context)).unsqueeze(1), turns).squeeze(1)
        index_write(keys, cache, scales, context.batch.groups[kept.group].slot_mapping)
        top_k = self.shape.top_k
        if all(longest_context(batch) <= top_k for _, batch in parts):
            return [None] * len(parts)
        heads, dim = self.shape.num_heads, self.shape.head_dim
        q = self._turned(torch.unflatten(self.q_proj(reduced, context), 1, (heads, dim)), turns)
        weights = self.weights_proj(x.float(), context) * (heads * dim) ** -0.5
        row_bytes = latent.shape[3] * x.element_size()
        found: list[torch.Tensor | None] = []
        for rows, batch in parts:
            if longest_context(batch) <= top_k:
                found.append(None)
                continue
            pieces = []
            for few in readers_of(batch, top_k, row_bytes):
                own = slice(rows.start + few.rows.start, rows.start + few.rows.stop)
                scores = index_scores(q[own], weights[own], cache, scales, few.block_tables, few.visible, few.longest)
                positions = select_keys(scores, few.visible, min(top_k, few.longest))
                pieces.append(F.pad(positions, (0, top_k - positions.shape[1])))
            found.append(torch.cat(pieces))
        return found

    def _turned(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate the first numbers of heads [tokens, heads, dim]."""
        turning, rest = torch.split(x, [self.turning, x.shape[2] - self.turning], dim=2)
        return torch.cat((rotary(turning, *turns, self.shape.is_interleaved), rest), dim=2)
