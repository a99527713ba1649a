"""The parameters of one layer's attention: scale, window, sinks, soft cap and scales of an FP8 cache.

Shared by every paged attention, and checked here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck


class AttentionRule(NamedTuple):
    """The parameters of one layer's attention. A layer makes its rule once."""

    scale: float
    window: int | None = None  # number of last tokens that a query sees, itself included
    sinks: Tensor | None = None  # [heads]: one extra score per head, which takes weight and adds no value
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    # [2] fp32, for caches in FP8: the factors by which stored keys and stored values are multiplied
    kv_scales: Tensor | None = None
    is_chunked: bool = False  # positions are cut into chunks of `window` tokens, and a query sees only its own chunk

    @property
    def is_naive(self) -> bool:
        """True if torch's fused attention cannot compute this rule."""
        return self.sinks is not None or self.soft_cap is not None or self.kv_scales is not None

    def require(self, check: ArgumentCheck, q: Tensor) -> None:
        """Raise ArgumentError for the first invalid parameter.

        The scales are checked with the cache (paged.py).
        """
        if self.sinks is not None:
            check.tensor("rule.sinks", self.sinks, "heads", (q.dtype, torch.float32), dense=1)
        check.require("rule.scale", self.scale > 0, f"is {self.scale}, wanted a positive number")
        check.require(
            "rule.window", self.window is None or self.window > 0, f"is {self.window}: a token sees at least itself"
        )
        check.require(
            "rule.is_chunked",
            not self.is_chunked or self.window is not None,
            "is set, but rule.window, the length of a chunk, is not",
        )
        positive = self.soft_cap is None or self.soft_cap > 0
        check.require("rule.soft_cap", positive, f"is {self.soft_cap}, wanted a positive number or None")
