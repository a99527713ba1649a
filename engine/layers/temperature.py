"""What queries are multiplied by as their positions grow, so that scores stay as sharp over long contexts (Nakanishi, Scalable-Softmax, arXiv
2501.19399): Llama 4's where nothing turns, Ministral 3's and Mistral 4's in every layer."""

from typing import NamedTuple

import torch


class Temperature(NamedTuple):
    floor: float  # tokens; the first so many are multiplied by 1
    scale: float
    shift: float  # tokens that are added to a position first

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [tokens] -> [tokens, 1, 1] fp32: 1 + scale * ln(1 + floor((position + shift) / floor))"""
        steps = torch.floor((positions.float() + self.shift) / self.floor)
        return (torch.log1p(steps) * self.scale + 1.0).view(-1, 1, 1)
