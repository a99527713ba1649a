"""Llama 4's config: chunked attention, full in every fourth layer; experts; optionally a vision tower."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.description.decoder_config import DecoderConfig, LayerKind, read_top_k, text_keys
from pilotlight.engine.description.families.dense_decoders import layers_that_turn
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import NO_IMAGES, AttentionShape, ExpertsShape, ImageNeeds
from pilotlight.engine.description.tensor_sizes import WeightShape, experts, gated, router
from pilotlight.engine.description.vision_config import ENCODED_BYTES, TiledVision
from pilotlight.engine.weights.config import flag, layer_numbers, number, positive_int, positive_number, refuse_unless

_TOWER = r"(vision_model|multi_modal_projector)\..*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(DecoderConfig):
    attention_bias: bool
    qk_norm: bool
    temperature: tuple[float, float, float] | None  # growth of queries that are not rotated, as in DenseConfig
    intermediate_size: int  # inner size of dense layers
    experts: ExpertsShape
    top_k: int
    sparse_layers: frozenset[int]
    vision: TiledVision | None

    def attention(self, layer: int) -> AttentionShape:
        shape = DecoderConfig.attention(self, layer)
        return shape._replace(is_interleaved=True, turns_first=True, is_tempered=shape.rotary is None)

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        hidden, forward, bias = self.hidden_size, f"{name}.feed_forward", self.attention_bias
        attention = self.attention_weights(name, qkv_bias=bias, o_bias=bias)
        if layer not in self.sparse_layers:
            return [*attention, *gated(forward, hidden, self.intermediate_size)]
        shared = f"{forward}.shared_expert"
        return [
            *attention,
            *router(f"{forward}.router", self.experts.num_experts, hidden),
            *experts(f"{forward}.experts", self.experts, self.top_k),
            *gated(shared, hidden, self.experts.intermediate_size, part="shared_experts"),
        ]

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        return ImageNeeds(ENCODED_BYTES, self.vision.encoding_bytes(item_bytes)) if self.vision else NO_IMAGES

    @property
    def outer_weights(self) -> list[WeightShape]:
        vision = self.vision.weights(self.hidden_size) if self.vision else []
        return [*self.text_weights, *vision]


def parse_config(config: Mapping[str, Any]) -> Llama4Config:
    """Parse a config.json. With a vision tower the decoder's keys are under text_config."""
    text = text_keys(config)
    num_layers, step = positive_int(text, "num_hidden_layers"), positive_int(text, "interleave_moe_layer_step", 1)
    num_experts = positive_int(text, "num_local_experts", 16)
    sparse: Sequence[int] = range(step - 1, num_layers, step)
    if text.get("moe_layers") is not None:
        sparse = layer_numbers(text, "moe_layers", num_layers)
    tuned = flag(text, "attn_temperature_tuning", True)
    return Llama4Config.read(
        text,
        layers=_layers(text, num_layers),
        rotary=(read_rotary_rule(text, 500_000.0),),
        default_eps=1e-5,
        attention_bias=flag(text, "attention_bias", False),
        qk_norm=flag(text, "use_qk_norm", True),
        temperature=(positive_number(text, "floor_scale", 8192.0), number(text, "attn_scale", 0.1), 1.0)
        if tuned
        else None,
        intermediate_size=positive_int(text, "intermediate_size_mlp", 16384),
        experts=ExpertsShape(
            num_experts, positive_int(text, "hidden_size"), positive_int(text, "intermediate_size", 8192)
        ),
        top_k=read_top_k(text, num_experts, 1),
        sparse_layers=frozenset(sparse),
        vision=TiledVision.read(vision) if (vision := config.get("vision_config")) else None,
        beside=_TOWER if "Llama4ForConditionalGeneration" in config["architectures"] else "",
    )


def _layers(config: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    """Return the layers; those with rotation attend within chunks, and cache only the last chunk."""
    chunk = positive_int(config, "attention_chunk_size", 8192)
    turns = layers_that_turn(config, num_layers)
    types = ["chunked_attention" if turns[i] else "full_attention" for i in range(num_layers)]
    refuse_unless(config, "layer_types", types, None)
    return tuple(LayerKind(chunk, is_chunked=True) if turns[i] else LayerKind(rotary=None) for i in range(num_layers))
