"""gpt-oss' config: attention with sinks, windows in every second layer, experts with biases.

The experts' weights are plain, in MXFP4 or in GGUF's blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import (
    DecoderConfig,
    LayerKind,
    mixed_layers,
    read_top_k,
    sliding_window,
)
from pilotlight.engine.description.rotary_scaling import RotaryRule, parse_rotary_rule
from pilotlight.engine.description.shapes import ExpertsShape
from pilotlight.engine.description.tensor_sizes import WeightShape, router
from pilotlight.engine.weights.config import flag, number, positive_int, quantization_method

_BLOCK = 32  # values per scale in MXFP4
# The default rotary parameters.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    attention_bias: bool
    experts: ExpertsShape
    top_k: int
    swiglu_alpha: float
    swiglu_limit: float

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        bias, name_of_experts = self.attention_bias, f"{name}.mlp.experts"
        num_experts, hidden, intermediate = self.experts
        gate_up = WeightShape(
            "experts",
            f"{name_of_experts}.gate_up_proj",
            2 * intermediate,
            hidden,
            "rows",
            2,
            experts=num_experts,
            active=self.top_k,
        )
        down = WeightShape(
            "experts",
            f"{name_of_experts}.down_proj",
            hidden,
            intermediate,
            "columns",
            experts=num_experts,
            active=self.top_k,
        )
        return [
            *self.attention_weights(name, qkv_bias=bias, o_bias=bias),
            *router(f"{name}.mlp.router", num_experts, hidden, bias=True),
            gate_up,
            gate_up._replace(name=f"{gate_up.name}_bias", columns=0),
            down,
            down._replace(name=f"{down.name}_bias", columns=0, split=None, is_sum=True),
        ]


def parse_config(config: Mapping[str, Any]) -> GptOssConfig:
    hidden, intermediate = positive_int(config, "hidden_size"), positive_int(config, "intermediate_size")
    num_experts = positive_int(config, "num_local_experts", config.get("num_experts", 128))
    if quantization_method(config) == "mxfp4" and (hidden % _BLOCK or intermediate % _BLOCK):
        raise CheckpointError(
            f"config.json has hidden_size {hidden} and intermediate_size {intermediate}: "
            f"mxfp4 keeps {_BLOCK} values under one scale, so both must be multiples of it"
        )
    return GptOssConfig.read(
        config,
        layers=_layers(config),
        rotary=(_rotary(config),),
        quantizations=("mxfp4", "gguf"),
        default_head_dim=64,
        default_eps=1e-5,
        attention_bias=flag(config, "attention_bias", True),
        experts=ExpertsShape(num_experts, hidden, intermediate),
        top_k=read_top_k(config, num_experts, 4),
        swiglu_alpha=number(config, "swiglu_alpha", 1.702),
        swiglu_limit=number(config, "swiglu_limit", 7.0),
    )


def _layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    num_layers = positive_int(config, "num_hidden_layers")
    default = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))
    return tuple(kind._replace(has_sinks=True) for kind in mixed_layers(config, sliding_window(config, 128), default))


def _rotary(config: Mapping[str, Any]) -> RotaryRule:
    described = config.get("rope_parameters") or config.get("rope_scaling") or _YARN
    return parse_rotary_rule(config, described, number(config, "rope_theta", 150_000.0))
