"""The frequencies of rotary embeddings under a checkpoint's scaling rule.

They are kept as one table of cosines and sines per position.
"""

import math
from collections.abc import Mapping

import torch

from pilotlight.engine.description.rotary_scaling import RotaryRule
from pilotlight.kernels.elementwise.rows import rows_of


class RotaryTable:
    """A table of cos, sin [context_length, rotated pairs of a head] in fp32, filled by `compute`."""

    def __init__(self, rule: RotaryRule, head_dim: int, context_length: int, device: torch.device) -> None:
        self._rule = rule
        self._turning = rule.turning(head_dim)
        self.cos, self.sin = torch.empty(2, context_length, self._turning // 2, device=device).unbind()
        self.is_by_place = rule.sections is not None
        self._axes: torch.Tensor | None = None

    def compute(self) -> None:
        frequencies = rotary_frequencies(self._rule, self._turning)
        angles = torch.outer(torch.arange(self.cos.shape[0], dtype=torch.float32), frequencies)
        # yarn and longrope sharpen attention: the factor is applied to both queries and keys
        factor = self._rule.values.get("attention_factor", 1.0)
        self.cos.copy_(angles.cos() * factor)
        self.sin.copy_(angles.sin() * factor)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [tokens, pairs] of positions [tokens]."""
        return rows_of(self.cos, positions), rows_of(self.sin, positions)

    def at_places(self, positions: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [tokens, pairs] of an image's tokens.

        `positions` [tokens]: for each token, the position of its image's first token; `places` [2, tokens]: the token's row and column. Each pair is
        rotated by the position, the position plus the row, or the position plus the column.
        """
        if self._axes is None:
            self._axes = torch.tensor(_axes(self._rule, self._turning // 2), device=self.cos.device)
        three = torch.stack([positions, *(positions + places)])
        axes = self._axes.expand(1, positions.shape[0], -1)
        return self.cos[three].gather(0, axes)[0], self.sin[three].gather(0, axes)[0]


def _axes(rule: RotaryRule, pairs: int) -> list[int]:
    """Return the axis by which each pair of a head is rotated: 0 is the position, 1 the row, 2 the column."""
    assert rule.sections is not None, "its tokens are rotated by their positions alone"
    if not rule.is_interleaved:
        return [axis for axis, size in enumerate(rule.sections) for _ in range(size)]
    return [axis if (axis := i % 3) and i < 3 * rule.sections[axis] else 0 for i in range(pairs)]


def rotary_frequencies(rule: RotaryRule, turning: int) -> torch.Tensor:
    """Return the radians per position for each pair of a head's `turning` rotated numbers, [turning / 2]."""
    exponents = torch.arange(0, turning, 2, dtype=torch.int64).float() / turning
    frequencies: torch.Tensor = 1.0 / (rule.theta**exponents)
    if rule.rope_type == "linear":
        return frequencies / rule.values["factor"]
    if rule.rope_type == "llama3":
        return _llama3(frequencies, rule.values)
    if rule.rope_type == "yarn":
        return _yarn(frequencies, rule)
    if rule.rope_type == "proportional":
        frequencies[int(rule.values["share"] * turning // 2) :] = 0.0
        return frequencies / rule.values["factor"]
    if rule.rope_type == "longrope":
        return frequencies / torch.tensor(rule.factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    """Stretch waves longer than the trained context by `factor`, keep short ones, and blend between them.

    The blend is linear in frequency.
    """
    low, high, factor = (values[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    # full turns within the trained context
    turns = values["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rule: RotaryRule) -> torch.Tensor:
    """Stretch long waves as llama3 does, but blend linearly in the dimension's index.

    The blend is between the dimensions that turn `beta_fast` and `beta_slow` times within the trained context.
    """
    half = frequencies.shape[0]
    values = rule.values

    def dimension(turns: float) -> float:
        """Return the fractional index of the pair of dimensions that turns `turns` times."""
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
