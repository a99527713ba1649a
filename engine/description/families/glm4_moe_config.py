"""The config of GLM-4.5, 4.6 and 4.7: grouped-query attention of whose heads a part turns, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import LayerKind
from pilotlight.engine.description.grouped_moe import GroupedMoeConfig, read_experts
from pilotlight.engine.description.rotary_scaling import parse_rotary_rule
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.weights.config import flag, number, positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(GroupedMoeConfig):
    attention_bias: bool
    qk_norm: bool
    turning: int  # of each head's numbers, the first ones

    @property
    def rotary_dim(self) -> int:
        return self.turning

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        attention = self.attention_weights(name, qkv_bias=self.attention_bias, qk_norm=self.qk_norm)
        return [*attention, *self.feed_forward_weights(layer, f"{name}.mlp")]


def parse_config(config: Mapping[str, Any]) -> Glm4MoeConfig:
    described = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json has rotary parameters {described!r}; they must be an object")
    share = number(described, "partial_rotary_factor", number(config, "partial_rotary_factor", 0.5))
    heads, hidden = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
    turning = int(positive_int(config, "head_dim", hidden // heads) * share)
    if not 0.0 < share <= 1.0 or turning < 2 or turning % 2:
        raise CheckpointError(
            f"config.json has partial_rotary_factor = {share}, by which {turning} numbers of a head turn; they must be pairs"
        )
    theta = number(config, "rope_theta", 10_000.0)
    whole = {**config, "partial_rotary_factor": None}
    return Glm4MoeConfig.read(
        config,
        rotary=(parse_rotary_rule(whole, {**described, "partial_rotary_factor": None}, theta),),
        layers=(LayerKind(),) * positive_int(config, "num_hidden_layers"),
        default_eps=1e-5,
        attention_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        turning=turning,
        **read_experts(config),
    )
