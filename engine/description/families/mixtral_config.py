"""Mixtral's config: Mistral's attention, and experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.description.decoder_config import DecoderConfig, read_top_k, sliding_window, uniform_layers
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import ExpertsShape
from pilotlight.engine.description.tensor_sizes import WeightShape, experts, router
from pilotlight.engine.weights.config import positive_int

EXPERT_PARTS = ("w1", "w3", "w2")  # gate, up and down


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    experts: ExpertsShape
    top_k: int

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        sparse = f"{name}.block_sparse_moe"
        return [
            *self.attention_weights(name),
            *router(f"{sparse}.gate", self.experts.num_experts, self.hidden_size),
            *experts(f"{sparse}.experts", self.experts, self.top_k, EXPERT_PARTS),
        ]


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
