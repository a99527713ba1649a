"""A factor of queries that grows with their positions, so that scores stay sharp over long contexts.

See Nakanishi, Scalable-Softmax, arXiv 2501.19399. Llama 4 uses it in layers without rotation, Ministral 3 and Mistral 4 in every layer.
"""

from typing import NamedTuple

import torch


class Temperature(NamedTuple):
    floor: float  # positions per step of growth; the factor is 1 while position + shift is less
    scale: float
    shift: float  # added to a position before the division

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [tokens, 1, 1] fp32: 1 + scale * ln(1 + floor((position + shift) / floor))."""
        steps = torch.floor((positions.float() + self.shift) / self.floor)
        return (torch.log1p(steps) * self.scale + 1.0).view(-1, 1, 1)
