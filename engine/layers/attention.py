"""Grouped-query attention over the paged cache.

A call projects to queries, keys and values at once, rotates, writes to the cache, attends and projects the output.
"""

import re
from typing import Self

import torch
import torch.nn.functional as F

from pilotlight.engine.description.shapes import AttentionShape, NormKind
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import HeadNorm, JointNorm
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.verify_attention import verify_attention
from pilotlight.kernels.elementwise.activation import apply_gate
from pilotlight.kernels.elementwise.kv_write import kv_write
from pilotlight.kernels.elementwise.qkv import rotate_and_cache
from pilotlight.kernels.elementwise.rotary import rotary


class Attention:
    def __init__(
        self,
        qkv_proj: Linear,
        o_proj: Linear,
        shape: AttentionShape,
        qk_norm: HeadNorm | None = None,
        sinks: torch.Tensor | None = None,
        joint_norm: JointNorm | None = None,
        v_proj: Linear | None = None,
        gate_proj: Linear | None = None,
    ) -> None:
        """`joint_norm`: norm of a token's queries together, and of its keys together, before rotation.

        `v_proj`: projection to values, if `qkv_proj` has only queries and keys. `gate_proj`: projection to gates of the output, if it is separate.
        """
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.shape = shape
        self.qk_norm = qk_norm
        self.joint_norm = joint_norm
        self.v_proj = v_proj
        self.gate_proj = gate_proj
        self.rule = AttentionRule(shape.scale, shape.window, sinks, shape.soft_cap, is_chunked=shape.is_chunked)
        # True if one kernel can prepare queries and keys: heads may be normalised, and then their first numbers are rotated.
        varied = shape.is_interleaved or shape.turns_first or shape.is_tempered or shape.value_eps is not None
        is_centered = qk_norm is not None and qk_norm.is_centered
        self._is_plain = not (varied or shape.is_shared or is_centered) and joint_norm is None
        assert self._is_plain or not shape.is_gated, "gates are between queries that one kernel prepares"

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
        joint_norm: NormKind | None = None,
        input_size: int | None = None,
        sinks: str = "sinks",
    ) -> Self:
        """Load a layer's attention.

        `input_size`: size of the layer's input, if it differs from that of its output. `sinks`: name of the tensor of sinks, if the shape has sinks.
        """
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        heads, kv_heads = loader.shard.heads(shape[:2], name)
        value, reads = shape.value_dim or shape.head_dim, input_size or hidden_size
        parts = {"q": q_size * (1 + shape.is_gated), "k": kv_size, "v": kv_size}
        if shape.keys_are_values or value < shape.head_dim:
            del parts["v"]
        normed = "qk"
        if shape.is_shared:
            parts, normed = {"q": parts["q"]}, "q"
            loader.skip(rf"{re.escape(name)}\.(k_proj|v_proj|k_norm)\..*")  # some checkpoints have them, unused
        names = [f"{name}.{part}_proj" for part in parts]
        norm_names = [f"{name}.{part}_norm" for part in normed]
        v_proj = None
        if value < shape.head_dim:
            v_size = [shape.num_kv_heads * value]
            v_proj = Linear.load(loader, [f"{name}.v_proj"], v_size, reads, qkv_bias, "rows", value, repeats=True)
        gate_proj = None
        if (gate := shape.gate) is not None:
            rows = [shape.num_heads * gate.size]
            gate_proj = Linear.load(loader, [f"{name}.{gate.name}"], rows, reads, False, "rows", gate.size)
        return cls(
            Linear.load(loader, names, [*parts.values()], reads, qkv_bias, "rows", shape.head_dim),
            Linear.load(loader, [f"{name}.o_proj"], [hidden_size], shape.num_heads * value, o_bias, "columns", value),
            shape._replace(num_heads=heads, num_kv_heads=kv_heads),
            qk_norm and HeadNorm.load(loader, norm_names, shape[:2], shape.head_dim, qk_norm),
            loader.rows([f"{name}.{sinks}"], [shape.num_heads], split="rows") if shape.has_sinks else None,
            joint_norm and JointNorm.load(loader, norm_names, [q_size, kv_size], shape.head_dim, joint_norm),
            v_proj,
            gate_proj,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend from x [tokens, hidden]; return [tokens, hidden]."""
        value_dim = self.shape.value_dim
        batch, cache, tokens = context.batch, context.caches[self.shape.layer], x.shape[0]
        qkv, gate = self._projected(x, context)
        if self.gate_proj is not None:
            gates = torch.unflatten(self.gate_proj(x, context), 1, (self.shape.num_heads, -1))
            gate = gates.expand(-1, -1, value_dim or self.shape.head_dim).contiguous()
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
        if (prefill := group.prefill) is not None:
            if prefill.last_visible is not None and not self.shape.sees_images_whole:
                prefill = prefill._replace(last_visible=None)
            outputs.append(prefill_attention(q[decoded:], k_cache, v_cache, prefill, rule))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if value_dim is not None:
            attended = attended[..., :value_dim]
        if gate is not None:
            attended = apply_gate(attended, gate, True)
        return context.summed(self.o_proj(attended.reshape(tokens, -1), context))

    def _projected(self, x: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project x to queries, keys and values, and to gates if the layer has them: one after each query.

        A layer that reads the cache of an earlier one has queries alone.
        x [tokens, hidden] -> [tokens, heads + 2 * kv_heads, head_dim], and the gates of them [tokens, heads, head_dim] or None.
        Values with fewer numbers than keys are padded with zeros.
        """
        shape = self.shape
        made = torch.unflatten(self.qkv_proj(x, context), 1, (-1, shape.head_dim))
        if shape.is_gated:
            return made, made[:, 1 : 2 * shape.num_heads : 2]
        if shape.keys_are_values:
            return torch.cat((made, made[:, shape.num_heads :]), dim=1), None
        if self.v_proj is None:
            return made, None
        values = torch.unflatten(self.v_proj(x, context), 1, (shape.num_kv_heads, -1)) * shape.value_scale
        return torch.cat((made, F.pad(values, (0, shape.head_dim - values.shape[2]))), dim=1), None

    def _keep(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, context: Context) -> torch.Tensor:
        """Write keys and values of qkv [tokens, heads + 2 * kv_heads, head_dim], if it has any, to the cache.

        Return the queries, normalised and rotated as the layer requires.
        """
        rule = self.shape.rotary
        if not self._is_plain:
            return self._keep_varied(qkv, cache, slots, context)
        norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        turns = (qkv.new_empty((len(qkv), 0), dtype=torch.float32),) * 2 if rule is None else context.turns[rule]
        (cos, sin), (k_cache, v_cache) = turns, cache.segments
        return rotate_and_cache(
            qkv, norm, eps, cos, sin, k_cache, v_cache, slots, cache.scales, has_gates=self.shape.is_gated
        )

    def _keep_varied(self, qkv: torch.Tensor, cache: LayerCache, slots: torch.Tensor, context: Context) -> torch.Tensor:
        heads, kv_heads = self.shape.num_heads, 0 if self.shape.is_shared else self.shape.num_kv_heads
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if self.joint_norm is not None:
            qk = self.joint_norm(qk, context)
        if self.qk_norm is not None and not self.shape.turns_first:
            qk = self.qk_norm(qk)
        if self.shape.rotary is not None:
            qk = turn(qk, *context.turns[self.shape.rotary], self.shape.is_interleaved)
        if self.qk_norm is not None and self.shape.turns_first:
            qk = self.qk_norm(qk)
        if kv_heads:
            if self.shape.value_eps is not None:
                v = F.rms_norm(v.float(), v.shape[-1:], None, self.shape.value_eps).to(v.dtype)
            k_cache, v_cache = cache.segments
            kv_write(qk[:, heads:], v, k_cache, v_cache, slots, cache.scales)
        q = qk[:, :heads]
        if self.shape.is_tempered and context.temperatures is not None:
            q = (q * context.temperatures).to(q.dtype)
        return q


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotate the first 2 * n numbers of each head of x [tokens, heads, head_dim] by cos, sin [tokens, n]."""
    turning = 2 * cos.shape[1]
    if turning == x.shape[2]:
        return rotary(x, cos, sin, is_interleaved=is_interleaved)
    return torch.cat((rotary(x[..., :turning], cos, sin, is_interleaved=is_interleaved), x[..., turning:]), dim=2)
