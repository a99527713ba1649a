"""Gemma 3's (text) config: norms on both sides of attention and feed-forward, most layers looking through a window and turning by a rotary base of
their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import (
    LAYER_TYPES,
    DecoderConfig,
    LayerKind,
    mixed_layers,
    refuse_unless,
    sliding_window,
)
from pilotlight.engine.description.rotary_scaling import RotaryRule, parse_rotary_rule
from pilotlight.engine.description.tensor_sizes import WeightShape, gated
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number

_FULL, _SLIDING = 0, 1  # the two rotary rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    intermediate_size: int
    attention_bias: bool
    is_bidirectional: bool = False  # every token sees those on both sides, and nothing is cached

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        # zero arguments of super() do not work in a dataclass with slots, which is made twice
        return () if self.is_bidirectional else super(Gemma3Config, self).cached_layers

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        bias = self.attention_bias
        return [
            *self.attention_weights(name, qkv_bias=bias, o_bias=bias, qk_norm=True, num_norms=4),
            *gated(f"{name}.mlp", self.hidden_size, self.intermediate_size),
        ]


def parse_config(config: Mapping[str, Any]) -> Gemma3Config:
    refuse_unless(config, "attn_logit_softcapping", None)
    refuse_unless(config, "final_logit_softcapping", None)
    is_bidirectional = flag(config, "use_bidirectional_attention", False)
    return Gemma3Config.read(
        config,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        layers=_layers(config, is_bidirectional),
        rotary=_rotary(config),
        default_head_dim=256,
        norm_offset=1.0,
        attention_scale=positive_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        default_tied=True,
        intermediate_size=positive_int(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        is_bidirectional=is_bidirectional,
    )


def _layers(config: Mapping[str, Any], is_bidirectional: bool) -> tuple[LayerKind, ...]:
    period = positive_int(config, "sliding_window_pattern", 6)  # every sixth layer sees everything
    default = tuple(
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(positive_int(config, "num_hidden_layers"))
    )
    window = sliding_window(config, 4096)
    if is_bidirectional and window is not None:  # half of it on each side, as transformers reads it
        window = window // 2 + 1
    return mixed_layers(config, window, default, sliding_rotary=_SLIDING)


def _rotary(config: Mapping[str, Any]) -> tuple[RotaryRule, ...]:
    """Scaling and `rope_theta` are for layers that see everything; newer checkpoints keep one rule per layer type."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not nested.keys() <= set(LAYER_TYPES):
        raise CheckpointError(
            f"config.json has rope_parameters = {nested!r}; for Gemma 3 they must be an object per layer type, "
            f"{' and '.join(LAYER_TYPES)}"
        )
    full = nested.get("full_attention") or config.get("rope_scaling") or {}
    sliding = nested.get("sliding_attention") or {}
    return (
        parse_rotary_rule(config, full, number(config, "rope_theta", 1_000_000.0)),
        parse_rotary_rule(config, sliding, number(config, "rope_local_base_freq", 10_000.0)),
    )
