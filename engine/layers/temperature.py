"""What queries are multiplied by that do not turn, as their positions grow."""

from typing import NamedTuple

import torch


class Temperature(NamedTuple):
    floor: float  # tokens; the first so many are multiplied by 1
    scale: float

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [tokens] -> [tokens, 1, 1] fp32: 1 + scale * ln(1 + floor((position + 1) / floor))"""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        return (torch.log1p(steps) * self.scale + 1.0).view(-1, 1, 1)
