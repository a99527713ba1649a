"""The config of Qwen 3's mixture of experts: Qwen 3's attention, and experts in most or all layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.description.decoder_config import DecoderConfig, read_top_k, sliding_window, uniform_layers
from pilotlight.engine.description.shapes import ExpertsShape
from pilotlight.engine.description.tensor_sizes import WeightShape, experts, gated, router
from pilotlight.engine.weights.config import flag, layer_numbers, positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    attention_bias: bool
    intermediate_size: int  # of dense layers
    experts: ExpertsShape
    top_k: int
    renormalise: bool
    sparse_layers: frozenset[int]

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        bias, mlp = self.attention_bias, f"{name}.mlp"
        attention = self.attention_weights(name, qkv_bias=bias, o_bias=bias, qk_norm=True)
        if layer not in self.sparse_layers:
            return [*attention, *gated(mlp, self.hidden_size, self.intermediate_size)]
        return [
            *attention,
            *router(f"{mlp}.gate", self.experts.num_experts, self.hidden_size),
            *experts(f"{mlp}.experts", self.experts, self.top_k),
        ]


def parse_config(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    num_layers = positive_int(config, "num_hidden_layers")
    step, dense = positive_int(config, "decoder_sparse_step", 1), layer_numbers(config, "mlp_only_layers", num_layers)
    window = sliding_window(config, 4096) if flag(config, "use_sliding_window", False) else None
    num_experts = positive_int(config, "num_experts", config.get("num_local_experts", 128))
    return Qwen3MoeConfig.read(
        config,
        layers=uniform_layers(config, window),
        attention_bias=flag(config, "attention_bias", False),
        intermediate_size=positive_int(config, "intermediate_size"),
        experts=ExpertsShape(
            num_experts, positive_int(config, "hidden_size"), positive_int(config, "moe_intermediate_size")
        ),
        top_k=read_top_k(config, num_experts),
        renormalise=flag(config, "norm_topk_prob", False),
        sparse_layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )
