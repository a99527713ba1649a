"""Latent attention over the paged cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).

One vector per token is cached, which all heads read. Decodes are computed in absorbed form: the projections from vectors to keys and to values are
multiplied into queries and results, so that no key and no value is ever made. For prompts they are made if that takes fewer products
(expanded_attention.py). A layer with an index reads only the vectors that the index selects (key_indexer.py), once a context has more.
"""

import torch

from pilotlight.engine.description.shapes import LatentShape, NormKind
from pilotlight.engine.execution.batch import DecodeBatch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mla.expanded_attention import attend, is_cheaper
from pilotlight.engine.layers.mla.key_indexer import KeyIndexer
from pilotlight.engine.layers.mla.readers import readers_of
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.attention.mla import mla_decode, mla_prefill, mla_selected, mla_write
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.elementwise.rotary import rotary

# The families' published code uses this epsilon for queries and latent vectors, whatever config.json has for other norms.
_NORM = NormKind(1e-6)


class LatentAttention:
    def __init__(
        self,
        queries: "LatentQueries",
        latent_proj: Linear,
        latent_norm: RMSNorm,
        up_proj: torch.Tensor,
        o_proj: Linear,
        shape: LatentShape,
        indexer: KeyIndexer | None = None,
    ) -> None:
        """`up_proj` [heads, key + value, latent]: the projection from vectors to keys and values.

        `indexer`: selects the keys that are read; None if all are, or if an earlier layer selects them.
        """
        self.queries = queries
        self.latent_proj = latent_proj
        self.latent_norm = latent_norm
        self.up_proj = up_proj
        self.o_proj = o_proj
        self.shape = shape
        self.indexer = indexer

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, shape: LatentShape) -> "LatentAttention":
        heads, latent = shape.num_heads, shape.latent
        own, _ = loader.shard.heads((heads, heads), name)
        both = shape.key + shape.value
        # Unpacked: no kernel multiplies packed weights per head, and this matrix is 0.2 % of DeepSeek-V3's weights.
        up_proj = loader.unpacked().matrix([f"{name}.kv_b_proj"], [heads * both], latent, split="rows", unit=both)
        latent_name = f"{name}.kv_a_proj_with_mqa"
        return cls(
            LatentQueries.load(loader, name, hidden_size, shape),
            Linear.load(loader, [latent_name], [latent + shape.rotary], hidden_size, bias=False),
            RMSNorm.load(loader, f"{name}.kv_a_layernorm", latent, _NORM),
            torch.unflatten(up_proj.unpack(loader.dtype), 0, (own, both)),
            Linear.load(loader, [f"{name}.o_proj"], [hidden_size], heads * shape.value, False, "columns", shape.value),
            shape._replace(num_heads=own),
            KeyIndexer.load(loader, f"{name}.indexer", hidden_size, shape)
            if shape.key_index is not None and not shape.key_index.is_shared
            else None,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend from x [tokens, hidden]; return [tokens, hidden]."""
        kept = context.caches[self.shape.layer]
        batch, decoded = context.batch.groups[kept.group], context.batch.num_decoded
        cache, scale = kept.segments[0].squeeze(2), None if kept.scales is None else kept.scales[:1]
        norm, turns = self.latent_norm, context.turns[0] if self.shape.turns else self._still(x)
        mla_write(self.latent_proj(x, context), norm.weight, norm.eps, *turns, cache, batch.slot_mapping, scale)
        reduced = self.queries.reduced(x, context)
        q = self.queries(reduced, context)
        if context.temperatures is not None:
            q = (q * context.temperatures).to(q.dtype)
        q_key, q_rotary = torch.split(q, [self.shape.key, self.shape.rotary], dim=2)
        q_rotary = rotary(q_rotary, *turns, is_interleaved=True)
        parts = [(slice(0, decoded), few) for few in (batch.decode, batch.verify) if few is not None]
        if batch.prefill is not None:
            parts.append((slice(decoded, len(x)), batch.prefill))
        if self.indexer is not None:
            context.selected[:] = self.indexer(x, reduced, turns, kept, parts, context)
        selected = [None] * len(parts) if self.shape.key_index is None else context.selected
        outputs = [
            self._attend(q_key[rows], q_rotary[rows], cache, scale, part, positions)
            for (rows, part), positions in zip(parts, selected, strict=True)
        ]
        values = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return context.summed(self.o_proj(values.flatten(1), context))

    def _still(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cos and sin [tokens, pairs] of no rotation."""
        ones = x.new_ones(x.shape[0], self.shape.rotary // 2, dtype=torch.float32)
        return ones, torch.zeros_like(ones)

    def _attend(
        self,
        q_key: torch.Tensor,
        q_rotary: torch.Tensor,
        cache: torch.Tensor,
        cache_scale: torch.Tensor | None,
        batch: DecodeBatch | VarlenBatch,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from one part of a step; return [tokens, heads, value].

        `selected` [tokens, top_k]: the positions that its tokens read, None for all.
        """
        scale = self.shape.scale
        if selected is not None:
            values = []
            for few in readers_of(batch, selected.shape[1], cache.shape[2] * q_key.element_size()):
                places = few.block_tables, selected[few.rows], few.visible.clamp(max=selected.shape[1])
                queries = self.absorbed(q_key[few.rows]), q_rotary[few.rows]
                values.append(self.expanded(mla_selected(*queries, cache, *places, scale, cache_scale)))
            return torch.cat(values)
        if isinstance(batch, DecodeBatch):
            known = batch.block_tables, batch.context_lens, batch.max_context_len
            return self.expanded(mla_decode(self.absorbed(q_key), q_rotary, cache, *known, scale, cache_scale))
        if is_cheaper(batch, cache.shape[1], q_key.element_size(), self.shape):
            return attend(q_key, q_rotary, self.up_proj, cache, batch, self.shape, cache_scale)
        return self.expanded(mla_prefill(self.absorbed(q_key), q_rotary, cache, batch, scale, cache_scale))

    def absorbed(self, q_key: torch.Tensor) -> torch.Tensor:
        """Multiply queries [tokens, heads, key] by the projection to keys; return [tokens, heads, latent]."""
        return torch.bmm(q_key.transpose(0, 1), self.up_proj[:, : self.shape.key]).transpose(0, 1)

    def expanded(self, attended: torch.Tensor) -> torch.Tensor:
        """Multiply attended vectors [tokens, heads, latent] by the projection to values."""
        return torch.bmm(attended.transpose(0, 1), self.up_proj[:, self.shape.key :].transpose(1, 2)).transpose(0, 1)


class LatentQueries:
    """The projection to queries [tokens, heads, key + rotary], direct or through `query_rank` numbers."""

    def __init__(self, down_proj: Linear | None, norm: RMSNorm | None, proj: Linear, query: int) -> None:
        self.down_proj = down_proj
        self.norm = norm
        self.proj = proj
        self.query = query

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, shape: LatentShape) -> "LatentQueries":
        rows, rank = [shape.num_heads * shape.query], shape.query_rank
        if rank is None:
            proj = Linear.load(loader, [f"{name}.q_proj"], rows, hidden_size, False, "rows", shape.query)
            return cls(None, None, proj, shape.query)
        return cls(
            Linear.load(loader, [f"{name}.q_a_proj"], [rank], hidden_size, bias=False),
            RMSNorm.load(loader, f"{name}.q_a_layernorm", rank, _NORM),
            Linear.load(loader, [f"{name}.q_b_proj"], rows, rank, False, "rows", shape.query),
            shape.query,
        )

    def reduced(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the input of the projection to queries: [tokens, query_rank], or x [tokens, hidden]."""
        return x if self.down_proj is None or self.norm is None else self.norm(self.down_proj(x, context))

    def __call__(self, reduced: torch.Tensor, context: Context) -> torch.Tensor:
        return torch.unflatten(self.proj(reduced, context), 1, (-1, self.query))
