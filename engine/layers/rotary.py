"""The frequencies of rotary embeddings under a checkpoint's scaling rule, as one table of cosines and sines per
position.

Knows the rules `default`, `linear` and `llama3`; any other is refused by name rather than approximated.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import CheckpointError


class RotaryTable:
    """cos, sin [context_length, head_dim / 2] in fp32."""

    def __init__(self, rule: Mapping[str, Any], head_dim: int, context_length: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), rotary_frequencies(rule, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [tokens] -> cos, sin [tokens, head_dim / 2]"""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotary_rule(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling rule of a config.json, from either place where checkpoints keep it."""
    rule = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rule.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rule["rope_type"] = rule.get("rope_type") or rule.get("type") or "default"
    if rule["rope_type"] not in _RULES:
        raise CheckpointError(
            f"config.json asks for rotary scaling {rule['rope_type']!r}; supported are {', '.join(_RULES)}"
        )
    missing = [key for key in _RULES[rule["rope_type"]] if key not in rule]
    if missing:
        raise CheckpointError(f"config.json asks for rotary scaling {rule['rope_type']!r} without {', '.join(missing)}")
    return rule


def rotary_frequencies(rule: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: torch.Tensor = 1.0 / (float(rule["rope_theta"]) ** exponents)
    if rule["rope_type"] == "linear":
        return frequencies / float(rule["factor"])
    if rule["rope_type"] == "llama3":
        return _llama3(frequencies, rule)
    return frequencies


_RULES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _llama3(frequencies: torch.Tensor, rule: Mapping[str, Any]) -> torch.Tensor:
    """Waves longer than the trained context are stretched by `factor`, short ones kept, those between blended linearly
    in frequency."""
    low, high, factor = (float(rule[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    # full turns within the trained context
    turns = float(rule["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies
