"""Qwen 3 as a table of parts: Qwen 2's, with queries and keys normalised per head instead of biased."""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.qwen2_config import qwen_layers
from pilotlight.engine.weights.config import flag, positive_int


def parse_config(config: Mapping[str, Any]) -> DenseConfig:
    attention_bias = flag(config, "attention_bias", False)
    return DenseConfig.read(
        config,
        layers=qwen_layers(config),
        default_head_dim=128,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )
