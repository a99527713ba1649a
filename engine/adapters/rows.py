"""A step's adapters, as the layers of a model see them."""

from typing import NamedTuple

import torch

from pilotlight.kernels.lora import add_lora


class AdapterRows(NamedTuple):
    values: torch.Tensor  # of all slots
    places: torch.Tensor  # [slots, projections, 3] int64
    slots: torch.Tensor  # [tokens] int64, -1: none

    def add(self, y: torch.Tensor, x: torch.Tensor, first: int, ends: tuple[int, ...]) -> torch.Tensor:
        """Add to y, the product of x with some projections that lie side by side, what each token's adapter adds. `first`: of their numbers;
        `ends`: their last columns."""
        return add_lora(y, x, self.values, self.places[:, first : first + len(ends)], self.slots, ends)
