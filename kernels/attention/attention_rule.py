"""How scores become weights, beside softmax: what every paged attention takes, checked in one place."""

from typing import NamedTuple

import torch
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck


class AttentionRule(NamedTuple):
    """One of a layer, made once."""

    scale: float
    window: int | None = None  # the last tokens that a query sees, itself included
    sinks: Tensor | None = None  # [heads]: a score more, which takes weight and gives no value
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    # [2] fp32, of caches in FP8: what a stored key and a stored value are multiplied by
    kv_scales: Tensor | None = None
    is_chunked: bool = False  # positions are cut into chunks of a window's length, and a query sees its own chunk's

    @property
    def is_naive(self) -> bool:
        """True where torch's fused attention cannot compute it."""
        return self.sinks is not None or self.soft_cap is not None or self.kv_scales is not None

    def fits(self, q: Tensor) -> bool:
        """q [..., heads, head_dim]"""
        scale, window, sinks, soft_cap, _, is_chunked = self
        return (
            scale > 0
            and (window is None or window > 0)
            and not (is_chunked and window is None)
            and (soft_cap is None or soft_cap > 0)
            and (sinks is None or (sinks.shape == q.shape[-2:-1] and sinks.dtype in (q.dtype, torch.float32)))
            and (sinks is None or sinks.is_contiguous())
        )

    def require(self, check: ArgumentCheck, q: Tensor) -> None:
        """Raise ArgumentError for what does not fit. The scales are checked with the cache (paged.py)."""
        if self.sinks is not None:
            check.tensor("rule.sinks", self.sinks, "heads", (q.dtype, torch.float32), dense=1)
        check.require("rule.scale", self.scale > 0, f"is {self.scale}, wanted a positive number")
        check.require(
            "rule.window", self.window is None or self.window > 0, f"is {self.window}: a token sees at least itself"
        )
        check.require(
            "rule.is_chunked", not self.is_chunked or self.window is not None, "is set, and no chunk's length"
        )
        positive = self.soft_cap is None or self.soft_cap > 0
        check.require("rule.soft_cap", positive, f"is {self.soft_cap}, wanted a positive number, or None for none")
