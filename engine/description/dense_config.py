"""The config of a decoder of grouped-query attention and gated feed-forwards; families vary fields.

A family describes itself here; engine/models/dense.py loads it, and a plan counts it.
"""

from dataclasses import dataclass
from typing import Literal

from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.description.recurrent_shapes import RecurrentShape
from pilotlight.engine.description.shapes import NO_IMAGES, NORMS_BEFORE, AttentionShape, ImageBytes, NormNames
from pilotlight.engine.description.tensor_sizes import WeightShape, gated, norm
from pilotlight.engine.description.vision_config import ENCODED_BYTES, VisionShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.fused import FusedRows

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    intermediate_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head, before rotation
    joint_qk_norm: bool = False  # normalize all queries of a token together, and all keys
    norms: NormNames = NORMS_BEFORE
    activation: Activation = "silu"
    is_interleaved: bool = False  # the two numbers of a rotated pair are adjacent
    soft_cap: float | None = None  # of attention scores
    value_scale: float = 1.0
    value_dim: int | None = None  # size of a head's value, if smaller than its key's
    norms_values: bool = False  # without weights
    is_gated: bool = (
        False  # attention's output is multiplied by a gate, which the projection of queries computes as well
    )
    sinks_name: str = "sinks"
    # For queries: tokens per step, its weight, and tokens added to a position first
    temperature: tuple[float, float, float] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the results of attention and feed-forward that are added to the hidden states
    scales_layers: bool = False  # the checkpoint has a number by which a layer's result is multiplied
    logit_scale: float = 1.0
    logit_cap: float | None = None  # a logit l becomes logit_cap * tanh(l / logit_cap)
    is_fused: bool = False  # the checkpoint has queries, keys and values in one tensor, and gates and ups in one
    divided: tuple[FusedRows, ...] = ()  # other tensors that the checkpoint splits, or names otherwise
    recurrent: tuple[RecurrentShape | None, ...] = ()  # by layer, the recurrent mixer in place of attention
    is_bidirectional: bool = False  # every token sees tokens on both sides, and nothing is cached
    vision: VisionShape | None = None

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        if self.is_bidirectional:
            return ()
        # super() without arguments does not work in a dataclass with slots, which is created twice
        layers = super(DenseConfig, self).cached_layers
        mixers = self.recurrent or (None,) * len(layers)
        return tuple(
            layer if mixer is None else CachedLayer.of_state(*mixer.segments)
            for layer, mixer in zip(layers, mixers, strict=True)
        )

    def image_bytes(self, item_bytes: int) -> ImageBytes:
        return NO_IMAGES if self.vision is None else ImageBytes(ENCODED_BYTES, self.vision.encoding_bytes(item_bytes))

    @property
    def outer_weights(self) -> list[WeightShape]:
        return self.text_weights + ([] if self.vision is None else self.vision.weights(self.hidden_size))

    def mixer(self, layer: int) -> RecurrentShape | None:
        """Return the recurrent mixer of a layer, or None if the layer has attention."""
        return self.recurrent[layer] if self.recurrent else None

    @property
    def num_norms(self) -> int:
        return sum(name is not None for name in self.norms)

    @property
    def fused(self) -> tuple[FusedRows, ...]:
        if not self.is_fused:
            return self.divided
        q, kv, inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.intermediate_size
        return (
            FusedRows("self_attn.qkv_proj", {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
            FusedRows("mlp.gate_up_proj", {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            *self.divided,
        )

    def attention(self, layer: int) -> AttentionShape:
        plain = DecoderConfig.attention(self, layer)
        return plain._replace(
            soft_cap=self.soft_cap,
            is_interleaved=self.is_interleaved,
            is_tempered=self.temperature is not None,
            value_scale=self.value_scale,
            value_dim=self.value_dim,
            is_gated=self.is_gated,
            value_eps=self.norm.eps if self.norms_values else None,
        )

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        mixer, wide = self.mixer(layer), bool(self.norm.offset)
        if mixer is not None:
            norms = [norm(f"{name}.norm_{i}", self.hidden_size, is_wide=wide) for i in range(self.num_norms)]
            return [*mixer.weights(name, self.hidden_size), *norms, *self.feed_forward_weights(layer, name)]
        attention = self.attention_weights(
            name,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm or self.joint_qk_norm,
            num_norms=self.num_norms,
            shape=self.attention(layer),
        )
        if self.scales_layers:
            attention.append(WeightShape("norms", f"{name}.layer_scalar", 1))
        return [*attention, *self.feed_forward_weights(layer, name)]

    def feed_forward_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer's feed-forward."""
        return gated(f"{name}.mlp", self.hidden_size, self.intermediate_size, bias=self.mlp_bias)
