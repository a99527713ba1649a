"""Mixtral as a table of parts: Mistral's attention, and experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.moe import Experts, ExpertsShape, SparseMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import read_rotary_rule
from engine.models.decoder import Decoder, DecoderLayer, load_decoder
from engine.models.decoder_config import DecoderConfig, read_top_k, sliding_window, uniform_layers
from engine.weights.config import positive_int
from engine.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    experts: ExpertsShape
    top_k: int


def parse_config(config: Mapping[str, Any]) -> MixtralConfig:
    num_experts = positive_int(config, "num_local_experts", 8)
    return MixtralConfig.read(
        config,
        layers=uniform_layers(config, sliding_window(config, None)),
        rotary=(read_rotary_rule(config, 1_000_000.0),),
        default_eps=1e-5,
        experts=ExpertsShape(
            num_experts, positive_int(config, "hidden_size"), positive_int(config, "intermediate_size")
        ),
        top_k=read_top_k(config, num_experts, 2),
    )


def load(config: MixtralConfig, loader: WeightLoader, context_length: int) -> Decoder:
    hidden, norm = config.hidden_size, config.norm

    def layer(i: int, name: str) -> DecoderLayer:
        sparse = f"{name}.block_sparse_moe"
        return DecoderLayer(
            attention_norm=RMSNorm.load(loader, f"{name}.input_layernorm", hidden, norm),
            attention=Attention.load(loader, f"{name}.self_attn", hidden, config.attention(i)),
            feed_forward_norm=RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, norm),
            feed_forward=SparseMLP(
                Linear.load(loader, [f"{sparse}.gate"], [config.experts.num_experts], hidden, bias=False),
                Experts.load_each(loader, f"{sparse}.experts", config.experts, ("w1", "w3", "w2")),
                config.top_k,
                renormalise=True,
            ),
        )

    return load_decoder(config, loader, context_length, layer)
