"""Latent attention over the paged cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).

One vector per token is cached, which all heads read. Decodes are computed in absorbed form: the projections from vectors to keys and to values are
multiplied into queries and results, so that no key and no value is ever made. For prompts they are made if that takes fewer products
(expanded_attention.py).
"""

import torch

from pilotlight.engine.description.shapes import LatentShape, NormKind
from pilotlight.engine.execution.batch import DecodeBatch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.expanded_attention import attend, is_cheaper
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.attention.mla import mla_decode, mla_prefill, mla_write
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
    ) -> None:
        """`up_proj` [heads, key + value, latent]: the projection from vectors to keys and values."""
        self.queries = queries
        self.latent_proj = latent_proj
        self.latent_norm = latent_norm
        self.up_proj = up_proj
        self.o_proj = o_proj
        self.shape = shape

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
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend from x [tokens, hidden]; return [tokens, hidden]."""
        kept = context.caches[self.shape.layer]
        (segment,), batch = kept.segments, context.batch.groups[kept.group]
        cache, decoded = segment.squeeze(2), context.batch.num_decoded
        norm, (cos, sin) = self.latent_norm, context.turns[0] if self.shape.turns else self._still(x)
        mla_write(self.latent_proj(x, context), norm.weight, norm.eps, cos, sin, cache, batch.slot_mapping)
        q = self.queries(x, context)
        if context.temperatures is not None:
            q = (q * context.temperatures).to(q.dtype)
        q_key, q_rotary = torch.split(q, [self.shape.key, self.shape.rotary], dim=2)
        q_rotary = rotary(q_rotary, cos, sin, is_interleaved=True)
        outputs = []
        for few in (batch.decode, batch.verify):
            if few is not None:
                outputs.append(self._absorbed(q_key[:decoded], q_rotary[:decoded], cache, few))
        if (prompts := batch.prefill) is not None:
            outputs.append(self._prompts(q_key[decoded:], q_rotary[decoded:], cache, prompts))
        values = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return context.summed(self.o_proj(values.flatten(1), context))

    def _still(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cos and sin [tokens, pairs] of no rotation."""
        ones = x.new_ones(x.shape[0], self.shape.rotary // 2, dtype=torch.float32)
        return ones, torch.zeros_like(ones)

    def _prompts(
        self, q_key: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, batch: VarlenBatch
    ) -> torch.Tensor:
        if is_cheaper(batch, cache, self.shape):
            return attend(q_key, q_rotary, self.up_proj, cache, batch, self.shape)
        return self._absorbed(q_key, q_rotary, cache, batch)

    def _absorbed(
        self, q_key: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, batch: DecodeBatch | VarlenBatch
    ) -> torch.Tensor:
        """Attend in absorbed form; return [tokens, heads, value]."""
        up_keys, up_values = torch.split(self.up_proj, [self.shape.key, self.shape.value], dim=1)
        q_latent, scale = torch.bmm(q_key.transpose(0, 1), up_keys).transpose(0, 1), self.shape.scale
        if isinstance(batch, DecodeBatch):
            tables, lens, longest = batch.block_tables, batch.context_lens, batch.max_context_len
            attended = mla_decode(q_latent, q_rotary, cache, tables, lens, longest, scale)
        else:
            attended = mla_prefill(q_latent, q_rotary, cache, batch, scale)
        return torch.bmm(attended.transpose(0, 1), up_values.transpose(1, 2)).transpose(0, 1)


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

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        if self.down_proj is not None and self.norm is not None:
            x = self.norm(self.down_proj(x, context))
        return torch.unflatten(self.proj(x, context), 1, (-1, self.query))
