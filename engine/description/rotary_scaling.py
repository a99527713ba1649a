"""The scaling rules of rotary embeddings that a config.json may ask for.

Knows the rules `default`, `linear`, `llama3` and `yarn`; any other is refused by name rather than approximated: `dynamic` and `longrope` turn a key
by the length of the text it will be read in, which a cached key cannot know.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.config import flag, number, positive_number


class RotaryRule(NamedTuple):
    """`values`: the numbers that the rule's type asks for, by their names in config.json."""

    rope_type: str
    theta: float
    values: Mapping[str, float] = MappingProxyType({})


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


_RULES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _yarn_values(described: Mapping[str, Any]) -> dict[str, float]:
    factor = number(described, "factor")
    mscale, mscale_all_dim = number(described, "mscale", 0.0), number(described, "mscale_all_dim", 0.0)

    inferred = sharpening(factor, 1.0)
    if mscale and mscale_all_dim:
        inferred = sharpening(factor, mscale) / sharpening(factor, mscale_all_dim)
    return {
        "attention_factor": number(described, "attention_factor", inferred),
        "beta_fast": positive_number(described, "beta_fast", 32.0),
        "beta_slow": positive_number(described, "beta_slow", 1.0),
        "truncate": float(flag(described, "truncate", True)),
    }


def sharpening(factor: float, weight: float) -> float:
    """Return what YaRN multiplies with for contexts that are stretched `factor` times (Peng et al., arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
