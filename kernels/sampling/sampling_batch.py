"""The sampling parameters of each row of logits, as in a request and as the device reads them.

It also has the constants of the function from costs to weights.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pilotlight.kernels.sampling.sampling_scale import highest_cost, scale_of

# The weight of the likeliest token. Sums of 2**20 entries fit in int64, and a weight of 0 means less than 2**-42 of its probability.
HEAVIEST = 1 << 42
MAX_VOCAB = 1 << 20
# A minimax polynomial in fp32 of 2**(24 - x) for x in [0, 1), with each operation rounded. Its error is at most 2.6e-7, like that of fp32 logits.
POWER = (-15852.8515625, 154447.65625, -927735.75, 4029554.25, -11629022.0, 16777216.0)


class SamplingRow(NamedTuple):
    """The parameters of one row. For truncation None, 1 and 0 mean off."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int  # below 2**64
    position: int  # position of the token to be drawn


class SamplingBatch(NamedTuple):
    """The parameters of all rows on the device, and what the host must know without waiting for it."""

    # [4, rows] int64: seed as a signed number, position, top_k (vocab if off), highest cost that min-p allows
    integers: Tensor
    reals: Tensor  # [2, rows] float64: scale, the cost of a distance of one, rounded to fp32 at its use; top_p (1: off)
    drawn: tuple[int, ...]  # rows whose temperature is not 0
    truncates: bool  # top-k or top-p is set in any row
    largest_top_k: int  # largest top-k of any row, 0 if none is set

    @classmethod
    def of(
        cls, rows: Sequence[SamplingRow], vocab: int, put: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> "SamplingBatch":
        """Make the batch. `put` moves all parameters to the device as one tensor."""
        integers, reals = array("q"), array("d")
        integers.extend([row.seed if row.seed < 1 << 63 else row.seed - (1 << 64) for row in rows])
        integers.extend([row.position for row in rows])
        top_k = [vocab if row.top_k is None or not row.temperature else min(row.top_k, vocab) for row in rows]
        integers.extend(top_k)
        integers.extend([highest_cost(row.min_p) for row in rows])
        reals.extend([scale_of(row.temperature) for row in rows])
        reals.extend([row.top_p if row.temperature else 1.0 for row in rows])
        packed = bytearray(integers.tobytes() + reals.tobytes())
        columns = put(
            (torch.frombuffer(packed, dtype=torch.int64) if rows else torch.empty(0)).long().view(6, len(rows))
        )
        largest = max((k for k in top_k if k < vocab), default=0)
        truncates = largest > 0 or any(row.top_p < 1.0 and row.temperature for row in rows)
        drawn = tuple([i for i, row in enumerate(rows) if row.temperature])
        return cls(columns[:4], columns[4:].view(torch.float64), drawn, truncates, largest)

    def select(self, rows: Tensor) -> "SamplingBatch":
        """Return the parameters of `rows`, none of which may be greedy."""
        count = tuple(range(len(self.drawn)))
        return self._replace(integers=self.integers[:, rows], reals=self.reals[:, rows], drawn=count)
