"""The scaling rules of rotary embeddings in a config.json.

The supported rules are `default`, `linear`, `llama3`, `yarn`, `proportional` and `longrope`; any other rule is refused by name. `dynamic` cannot be
supported, because it rotates keys depending on the final length of the text, which is unknown when a key is cached. The published `longrope` depends
on the length as well, by its two lists of factors. Here, as in vLLM, a model whose context is longer than the trained one uses the long list at every
length, and any other model the short list.

A rule may apply to a part of each head only (`partial_rotary_factor`).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.config import flag, number, positive_number


class RotaryRule(NamedTuple):
    """A rotary rule. `values`: parameters of its type, by their names in config.json."""

    rope_type: str
    theta: float
    values: Mapping[str, float] = MappingProxyType({})
    share: float = 1.0  # share of each head's numbers, counted from the first, that is rotated
    factors: tuple[float, ...] = ()  # divisors of the pairs' frequencies, for longrope
    # For images that are rotated by row and column: number of pairs that are rotated by the position, by the row and by the column.
    sections: tuple[int, ...] | None = None
    is_interleaved: bool = False  # pairs of the sections alternate; else the sections follow each other

    def turning(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated. Raises CheckpointError if they do not form pairs."""
        turning = int(head_dim * self.share)
        if turning < 2 or turning % 2:
            raise CheckpointError(
                f"config.json has partial_rotary_factor = {self.share}, by which {turning} numbers of a head turn; they must be pairs"
            )
        if self.factors and len(self.factors) != turning // 2:
            raise CheckpointError(
                f"config.json has {len(self.factors)} factors of {self.rope_type} for heads of which {turning // 2} pairs turn; each pair has one"
            )
        return turning


def read_rotary_rule(
    config: Mapping[str, Any], default_theta: float = 10_000.0, default_share: float = 1.0
) -> RotaryRule:
    """Return the rule in rope_parameters or rope_scaling of a config.json. Raises CheckpointError."""
    theta = number(config, "rope_theta", default_theta)
    return parse_rotary_rule(config, rotary_parameters(config), theta, default_share)


def by_place(
    rule: RotaryRule, text: Mapping[str, Any], head_dim: int, default: tuple[int, ...], *, interleaved: bool
) -> RotaryRule:
    """Return the rule with the sections of mrope_section, or `default`. Raises CheckpointError."""
    sections, pairs = rotary_parameters(text).get("mrope_section"), rule.turning(head_dim) // 2
    if sections is None and (interleaved or sum(default) == pairs):  # interleaved sections need not add up to all pairs
        return rule._replace(sections=default, is_interleaved=interleaved)
    if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != pairs or min(sections) < 0:
        raise CheckpointError(
            f"config.json has mrope_section = {sections!r}; it must be three numbers of {pairs} pairs together"
        )
    return rule._replace(sections=tuple(sections), is_interleaved=interleaved)


def rotary_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters of a config.json, which may be empty."""
    described = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json has rotary parameters {described!r}; they must be an object")
    return described


def parse_rotary_rule(
    config: Mapping[str, Any], described: Mapping[str, Any], default_theta: float, default_share: float = 1.0
) -> RotaryRule:
    """Parse a rule. `described`: the config's rope_parameters or rope_scaling, or one layer type's part."""
    if not isinstance(described, dict):
        raise CheckpointError(f"config.json has rotary parameters {described!r}; they must be an object")
    rope_type = described.get("rope_type") or described.get("type") or "default"
    rope_type = _OLDER_NAMES.get(rope_type, rope_type)
    if rope_type not in _RULES:
        raise CheckpointError(f"config.json asks for rotary scaling {rope_type!r}; supported are {', '.join(_RULES)}")
    # A missing trained length is taken from the config itself, or is the model's context length.
    length = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if described.get(_LENGTH) is None and _LENGTH in _RULES[rope_type] and length:
        described = {**described, _LENGTH: length}
    missing = [key for key in _RULES[rope_type] if described.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json asks for rotary scaling {rope_type!r} without {', '.join(missing)}")
    share = number(described, "partial_rotary_factor", number(config, "partial_rotary_factor", default_share))
    if not 0.0 < share <= 1.0:
        raise CheckpointError(f"config.json has partial_rotary_factor = {share}; it must be above 0 and at most 1")
    theta = positive_number(described, "rope_theta", default_theta)
    if rope_type == "proportional":  # all pairs are rotated, those beyond `share` with a frequency of 0
        values = {"factor": positive_number(described, "factor", 1.0), "share": share}
        return RotaryRule(rope_type, theta, values)
    if rope_type == "longrope":
        values, factors = _longrope(config, described)
        return RotaryRule(rope_type, theta, values, share, factors)
    values = {key: positive_number(described, key) for key in _RULES[rope_type]}
    if rope_type == "yarn":
        values |= _yarn_values(described)
    return RotaryRule(rope_type, theta, values, share)


# "mrope" has several positions per token, which differ only for images.
_OLDER_NAMES = {"su": "longrope", "mrope": "default"}
_LENGTH = "original_max_position_embeddings"
_RULES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}


def _longrope(config: Mapping[str, Any], described: Mapping[str, Any]) -> tuple[dict[str, float], tuple[float, ...]]:
    """Return the factor of cosines and sines, and the divisors of frequencies, as in transformers.

    The formulas are from Ding et al., arXiv 2402.13753.
    """
    trained = positive_number(described, _LENGTH)
    longest = positive_number(config, "max_position_embeddings", trained)
    key = "long_factor" if longest > trained else "short_factor"
    factors = described[key]
    if not isinstance(factors, list) or not factors:
        raise CheckpointError(f"config.json has {key} = {factors!r}; it must be a list of numbers")
    stretch = positive_number(described, "factor", longest / trained)
    inferred = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    values = {"attention_factor": number(described, "attention_factor", inferred)}
    return values, tuple(positive_number({key: one}, key) for one in factors)


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
    """Return YaRN's scale for contexts stretched `factor` times (Peng et al., arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
