"""Llama 2 and 3 as a table of parts.

Knows the keys of their config.json; the parts are in engine/layers, their order in engine/models/decoder.py.
"""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.weights.config import flag, positive_int


def parse_config(config: Mapping[str, Any]) -> DenseConfig:
    attention_bias = flag(config, "attention_bias", False)
    return DenseConfig.read(
        config,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )
