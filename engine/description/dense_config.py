"""The config of decoders with grouped-query attention and gated feed-forwards.

Model families differ in its fields. engine/models/dense.py loads such models, and memory plans count their weights.
"""

from dataclasses import dataclass
from typing import Literal

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.description.recurrent_shapes import RecurrentShape
from pilotlight.engine.description.shapes import (
    NO_IMAGES,
    NORMS_BEFORE,
    AttentionShape,
    GateShape,
    ImageNeeds,
    LayerInputShape,
    NormNames,
    WholeImages,
)
from pilotlight.engine.description.tensor_sizes import (
    GATED_PARTS,
    UNGATED_PARTS,
    XIELU_PARTS,
    WeightShape,
    embedding,
    gated,
    norm,
)
from pilotlight.engine.description.vision_config import ENCODED_BYTES, VisionShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.fused import FusedRows

Activation = Literal["silu", "gelu_tanh", "relu2", "xielu"]  # without a gate if relu2 or xielu


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    intermediate_size: int
    wide_layers: frozenset[int] = frozenset()  # layers with a dense feed-forward that is twice as wide
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head, before rotation
    joint_qk_norm: bool = False  # all queries of a token are normalised together, and all keys
    norms: NormNames = NORMS_BEFORE
    activation: Activation = "silu"
    is_interleaved: bool = False  # the two numbers of a rotated pair are adjacent
    turns_first: bool = False  # heads are normalised after rotation
    soft_cap: float | None = None  # soft cap of attention scores
    value_scale: float = 1.0
    value_dim: int | None = None  # size of a head's value if it is smaller than its key
    norms_values: bool = False  # values are normalised by a norm without weights
    is_gated: bool = False  # attention's output is multiplied by a gate, which the query projection also computes
    gate: GateShape | None = None  # gates of attention's output from a separate projection
    sinks_name: str = "sinks"
    # How queries grow with their position: (positions per step of growth, weight of the growth, offset of the position).
    temperature: tuple[float, float, float] | None = None
    embedding_scale: float = 1.0
    is_parallel: bool = False  # attention and feed-forward have the same input, and their outputs are added
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward before they are added
    scales_layers: bool = False  # a layer's result is multiplied by a number from the checkpoint
    logit_scale: float = 1.0
    logit_cap: float | None = None  # a logit l becomes logit_cap * tanh(l / logit_cap)
    is_fused: bool = False  # the checkpoint has one tensor for q, k and v, and one for gate and up
    divided: tuple[FusedRows, ...] = ()  # other tensors of the checkpoint that must be divided or renamed
    recurrent: tuple[RecurrentShape | None, ...] = ()  # by layer, the recurrent mixer that replaces attention, or None
    # Factors of the input and output of attention, then of the recurrent mixer, if each layer adds the outputs of both.
    joined: tuple[float, float, float, float] | None = None
    feed_forward_scales: tuple[float, float] = (1.0, 1.0)  # factors of a dense feed-forward's gates and of its output
    # By layer, the only part that it has; empty if every layer has a token mixer and a feed-forward.
    alone: tuple[Literal["mixer", "feed_forward"], ...] = ()
    is_bidirectional: bool = False  # every token sees tokens on both sides, and nothing is cached
    layer_inputs: LayerInputShape | None = None  # inputs of layers besides hidden states
    vision: VisionShape | None = None
    whole_images: WholeImages | None = None  # None if the tokens of images see only earlier ones, like text

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        if self.is_bidirectional:
            return ()
        # super() without arguments does not work in a dataclass with slots, because the class is created twice.
        layers = super(DenseConfig, self).cached_layers
        mixers = self.recurrent or (None,) * len(layers)
        if self.joined is not None:  # the states' caches follow those of attention
            return (*layers, *(CachedLayer.of_state(*mixer.segments) for mixer in mixers if mixer is not None))
        return tuple(
            CachedLayer(())
            if not self.has(i, "mixer")
            else layer
            if mixer is None
            else CachedLayer.of_state(*mixer.segments)
            for i, (layer, mixer) in enumerate(zip(layers, mixers, strict=True))
        )

    def check_stage(self, layers: range) -> None:
        if self.layer_inputs is not None and len(layers) < self.num_layers:
            raise CheckpointError(
                "the inputs of layers depend on embeddings, which only the first pipeline stage has: use one stage"
            )
        super(DenseConfig, self).check_stage(layers)

    def step_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes of the layers' inputs, and of the two parts of which they are the sum."""
        return 0 if self.layer_inputs is None else 3 * tokens * self.num_layers * self.layer_inputs.size * item_bytes

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        if self.vision is None:
            return NO_IMAGES
        whole = 0 if self.whole_images is None else self.whole_images.most_tokens
        return ImageNeeds(ENCODED_BYTES, self.vision.encoding_bytes(item_bytes), whole)

    @property
    def text_weights(self) -> list[WeightShape]:
        found = super(DenseConfig, self).text_weights
        if (inputs := self.layer_inputs) is not None:
            width = self.num_layers * inputs.size
            found += [
                embedding("layer_inputs", "model.embed_tokens_per_layer", inputs.vocab_size, width),
                WeightShape("dense", "model.per_layer_model_projection", width, self.hidden_size),
                norm("model.per_layer_projection_norm", inputs.size),
            ]
        return found

    @property
    def outer_weights(self) -> list[WeightShape]:
        return self.text_weights + ([] if self.vision is None else self.vision.weights(self.hidden_size))

    def mixer(self, layer: int) -> RecurrentShape | None:
        """Return the recurrent mixer of a layer, or None if the layer has attention."""
        return self.recurrent[layer] if self.recurrent else None

    def has(self, layer: int, part: Literal["mixer", "feed_forward"]) -> bool:
        """Return True if a layer has the part."""
        return layer >= len(self.alone) or self.alone[layer] == part

    @property
    def feed_forward_parts(self) -> tuple[str, ...]:
        """The names of the projections of a dense feed-forward or a shared expert."""
        return UNGATED_PARTS if self.activation in ("relu2", "xielu") else GATED_PARTS

    @property
    def num_norms(self) -> int:
        return 1 if self.alone else sum(name is not None for name in self.norms)

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
        plain, whole = DecoderConfig.attention(self, layer), self.whole_images
        return plain._replace(
            soft_cap=self.soft_cap,
            is_interleaved=self.is_interleaved,
            turns_first=self.turns_first,
            is_tempered=self.temperature is not None,
            value_scale=self.value_scale,
            value_dim=self.value_dim,
            is_gated=self.is_gated,
            gate=self.gate,
            value_eps=self.norm.eps if self.norms_values else None,
            sees_images_whole=whole is not None and (plain.window is not None or not whole.only_in_windows),
        )

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        mixer, wide = self.mixer(layer), bool(self.norm.offset)
        feed_forward = self.feed_forward_weights(layer, name) if self.has(layer, "feed_forward") else []
        if (mixer is not None and self.joined is None) or not self.has(layer, "mixer"):
            norms = [norm(f"{name}.norm_{i}", self.hidden_size, is_wide=wide) for i in range(self.num_norms)]
            return [*([] if mixer is None else mixer.weights(name, self.hidden_size)), *norms, *feed_forward]
        attention = self.attention_weights(
            name,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm or self.joint_qk_norm,
            num_norms=self.num_norms,
            shape=self.attention(layer),
        )
        if mixer is not None:
            attention += mixer.weights(name, self.hidden_size)
        if self.scales_layers:
            attention.append(WeightShape("norms", f"{name}.layer_scalar", 1))
        return [*attention, *feed_forward, *self._layer_input_weights(name)]

    def _layer_input_weights(self, name: str) -> list[WeightShape]:
        if (inputs := self.layer_inputs) is None:
            return []
        return [
            WeightShape("dense", f"{name}.per_layer_input_gate", inputs.size, self.hidden_size),
            WeightShape("dense", f"{name}.per_layer_projection", self.hidden_size, inputs.size),
            norm(f"{name}.post_per_layer_input_norm", self.hidden_size),
        ]

    def feed_forward_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer's feed-forward."""
        sizes = self.hidden_size, self.inner_size(layer)
        found = gated(f"{name}.mlp", *sizes, bias=self.mlp_bias, names=self.feed_forward_parts)
        if self.activation == "xielu":
            found += [WeightShape("dense", f"{name}.mlp.act_fn.{part}", 1, is_wide=True) for part in XIELU_PARTS]
        return found

    def inner_size(self, layer: int) -> int:
        """Return the number of channels of a layer's dense feed-forward."""
        return self.intermediate_size * (1 + (layer in self.wide_layers))
