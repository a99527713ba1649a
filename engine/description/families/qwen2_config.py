"""Qwen 2 and 2.5 as a table of parts: Llama's, with biases on queries, keys and values alone."""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.decoder_config import LayerKind, mixed_layers, sliding_window
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.weights.config import flag, positive_int


def parse_config(config: Mapping[str, Any]) -> DenseConfig:
    return DenseConfig.read(
        config, layers=qwen_layers(config), intermediate_size=positive_int(config, "intermediate_size"), qkv_bias=True
    )


def qwen_layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Layers from `max_window_layers` on see a window, if windows are asked for at all."""
    num_layers = positive_int(config, "num_hidden_layers")
    window = sliding_window(config, 4096) if flag(config, "use_sliding_window", False) else None
    full = min(num_layers, int(config.get("max_window_layers", 28)) if window else num_layers)
    default = ("full_attention",) * full + ("sliding_attention",) * (num_layers - full)
    return mixed_layers(config, window, default)
