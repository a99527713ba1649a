"""Mistral as a table of parts: Llama's without biases, each layer seeing at most a window of tokens."""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.decoder_config import sliding_window, uniform_layers
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.weights.config import positive_int


def parse_config(config: Mapping[str, Any]) -> DenseConfig:
    return DenseConfig.read(
        config,
        layers=uniform_layers(config, sliding_window(config, 4096)),
        intermediate_size=positive_int(config, "intermediate_size"),
    )
