"""Latent attention over the paged cache (DeepSeek-V2, arXiv 2405.04434, section 2.1): of each token one vector is kept, which all heads read.

In absorbed form: the projection that would make keys of the vectors is multiplied into the queries, and the one that would make values of them into
what they give, so that no key and no value is ever made.
"""

import torch

from engine.context import Context
from engine.description.shapes import LatentShape, NormKind
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.weights.loader import WeightLoader
from kernels.mla import mla_decode, mla_prefill, mla_write
from kernels.rotary import rotary

# The families' published code normalises queries and latent vectors by this, whatever config.json says of the other norms.
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
        """`up_proj` [heads, key + value, latent]: what would make keys and values of the vectors."""
        self.queries = queries
        self.latent_proj = latent_proj
        self.latent_norm = latent_norm
        self.up_keys, self.up_values = torch.split(up_proj, [shape.key, shape.value], dim=1)
        self.o_proj = o_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, name: str, hidden_size: int, shape: LatentShape) -> "LatentAttention":
        heads, latent = shape.num_heads, shape.latent
        own, _ = loader.shard.heads((heads, heads), name)
        both = shape.key + shape.value
        # Plain: no kernel multiplies packed heads one by one, and it is 0.2 % of DeepSeek-V3's weights.
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
        """x [tokens, hidden] -> [tokens, hidden]"""
        cached, (cos, sin) = context.caches[self.shape.layer], context.turns[0]
        cache = cached.segments[0].squeeze(2)
        slots = context.batch.groups[cached.group].slot_mapping
        mla_write(self.latent_proj(x, context), self.latent_norm.weight, self.latent_norm.eps, cos, sin, cache, slots)
        q = self.queries(x, context)
        q_key, q_rotary = torch.split(q, [self.shape.key, self.shape.rotary], dim=2)
        q_latent = torch.bmm(q_key.transpose(0, 1), self.up_keys).transpose(0, 1)
        attended = self._attend(q_latent, rotary(q_rotary, cos, sin, is_interleaved=True), cache, cached.group, context)
        values = torch.bmm(attended.transpose(0, 1), self.up_values.transpose(1, 2)).transpose(0, 1)
        return context.summed(self.o_proj(values.flatten(1), context))

    def _attend(
        self, q_latent: torch.Tensor, q_rotary: torch.Tensor, cache: torch.Tensor, group: int, context: Context
    ) -> torch.Tensor:
        """-> [tokens, heads, latent]"""
        outputs, batch, decoded, scale = [], context.batch.groups[group], context.batch.num_decoded, self.shape.scale
        if (decode := batch.decode) is not None:
            tables, lens, longest = decode.block_tables, decode.context_lens, decode.max_context_len
            outputs.append(mla_decode(q_latent[:decoded], q_rotary[:decoded], cache, tables, lens, longest, scale))
        if batch.verify is not None:
            outputs.append(mla_prefill(q_latent[:decoded], q_rotary[:decoded], cache, batch.verify, scale))
        if batch.prefill is not None:
            outputs.append(mla_prefill(q_latent[decoded:], q_rotary[decoded:], cache, batch.prefill, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class LatentQueries:
    """Queries [tokens, heads, key + rotary], projected at once or by way of a vector of `query_rank` numbers."""

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
