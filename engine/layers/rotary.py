"""The frequencies of rotary embeddings under a checkpoint's scaling rule, as one table of cosines and sines per
position.

Knows the rules `default`, `linear`, `llama3` and `yarn`; any other is refused by name rather than approximated:
`dynamic` and `longrope` turn a key by the length of the text it will be read in, which a cached key cannot know.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from engine.errors import CheckpointError
from engine.weights.config import flag, number, positive_number
from kernels.rows import rows_of


class RotaryRule(NamedTuple):
    """`values`: the numbers that the rule's type asks for, by their names in config.json."""

    rope_type: str
    theta: float
    values: Mapping[str, float] = MappingProxyType({})


class RotaryTable:
    """cos, sin [context_length, head_dim / 2] in fp32, once they are computed."""

    def __init__(self, rule: RotaryRule, head_dim: int, context_length: int, device: torch.device) -> None:
        self._rule = rule
        self._head_dim = head_dim
        self.cos, self.sin = torch.empty(2, context_length, head_dim // 2, device=device).unbind()

    def compute(self) -> None:
        frequencies = rotary_frequencies(self._rule, self._head_dim)
        angles = torch.outer(torch.arange(self.cos.shape[0], dtype=torch.float32), frequencies)
        # of yarn: sharpens attention, half of it in q and half in k
        factor = self._rule.values.get("attention_factor", 1.0)
        self.cos.copy_(angles.cos() * factor)
        self.sin.copy_(angles.sin() * factor)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [tokens] -> cos, sin [tokens, head_dim / 2]"""
        return rows_of(self.cos, positions), rows_of(self.sin, positions)


def read_rotary_rule(config: Mapping[str, Any], default_theta: float = 10_000.0) -> RotaryRule:
    """Read the scaling rule of a config.json, from either place where checkpoints keep it."""
    theta = number(config, "rope_theta", default_theta)
    return parse_rotary_rule(config, config.get("rope_parameters") or config.get("rope_scaling") or {}, theta)


def parse_rotary_rule(config: Mapping[str, Any], described: Mapping[str, Any], default_theta: float) -> RotaryRule:
    """Parse a rule. `described`: rope_parameters or rope_scaling of `config`, or the part of it that is for one type of layer."""
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json has rotary parameters {described!r}; they must be an object")
    rope_type = described.get("rope_type") or described.get("type") or "default"
    if rope_type not in _RULES:
        raise CheckpointError(f"config.json asks for rotary scaling {rope_type!r}; supported are {', '.join(_RULES)}")
    missing = [key for key in _RULES[rope_type] if described.get(key) is None]
    # a length that is not given is the model's own
    if "original_max_position_embeddings" in missing and config.get("max_position_embeddings"):
        missing.remove("original_max_position_embeddings")
        described = {**described, "original_max_position_embeddings": config["max_position_embeddings"]}
    if missing:
        raise CheckpointError(f"config.json asks for rotary scaling {rope_type!r} without {', '.join(missing)}")
    partial = number(described, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"config.json has partial_rotary_factor = {partial}; supported is 1.0, whole heads")
    values = {key: positive_number(described, key) for key in _RULES[rope_type]}
    if rope_type == "yarn":
        values |= _yarn_values(described)
    return RotaryRule(rope_type, positive_number(described, "rope_theta", default_theta), values)


def rotary_frequencies(rule: RotaryRule, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: torch.Tensor = 1.0 / (rule.theta**exponents)
    if rule.rope_type == "linear":
        return frequencies / rule.values["factor"]
    if rule.rope_type == "llama3":
        return _llama3(frequencies, rule.values)
    if rule.rope_type == "yarn":
        return _yarn(frequencies, rule)
    return frequencies


_RULES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _llama3(frequencies: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    """Waves longer than the trained context are stretched by `factor`, short ones kept, those between blended linearly
    in frequency."""
    low, high, factor = (values[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    # full turns within the trained context
    turns = values["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rule: RotaryRule) -> torch.Tensor:
    """As llama3, but blended linearly in the dimension's index, between the dimensions that turn `beta_fast` and
    `beta_slow` times within the trained context."""
    half = frequencies.shape[0]
    values = rule.values

    def dimension(turns: float) -> float:
        """The index, as a fraction, of the pair of dimensions that turns so often."""
        return (
            half * math.log(values["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(rule.theta)
        )

    low, high = dimension(values["beta_fast"]), dimension(values["beta_slow"])
    if values["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / values["factor"] * stretched + frequencies * (1 - stretched)


def _yarn_values(described: Mapping[str, Any]) -> dict[str, float]:
    factor = number(described, "factor")
    mscale, mscale_all_dim = number(described, "mscale", 0.0), number(described, "mscale_all_dim", 0.0)

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    inferred = sharpening(mscale) / sharpening(mscale_all_dim) if mscale and mscale_all_dim else sharpening(1.0)
    return {
        "attention_factor": number(described, "attention_factor", inferred),
        "beta_fast": positive_number(described, "beta_fast", 32.0),
        "beta_slow": positive_number(described, "beta_slow", 1.0),
        "truncate": float(flag(described, "truncate", True)),
    }
