"""The adapters of a step's tokens."""

from typing import NamedTuple

import torch

from pilotlight.kernels.lora import add_lora


class AdapterRows(NamedTuple):
    values: torch.Tensor  # values of all slots
    places: torch.Tensor  # [slots, projections, 3] int64
    slots: torch.Tensor  # [tokens] int64, -1 for none

    def add(self, y: torch.Tensor, x: torch.Tensor, first: int, ends: tuple[int, ...]) -> torch.Tensor:
        """Add each token's adapter to y, the product of x and some adjacent projections.

        `first`: index of the first of these projections; `ends`: where the columns of each projection end in y.
        """
        return add_lora(y, x, self.values, self.places[:, first : first + len(ends)], self.slots, ends)
