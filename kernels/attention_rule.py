"""How scores become weights, beside softmax: what every paged attention takes, looked at in one place."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import Call


class AttentionRule(NamedTuple):
    scale: float
    window: int | None = None  # the last tokens that a query sees, itself included
    sinks: Tensor | None = None  # [heads]: a score more, which takes weight and gives no value
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    kv_scales: Tensor | None = (
        None  # [2] fp32, of caches in FP8: what a stored key and a stored value are multiplied by
    )

    @property
    def is_written(self) -> bool:
        """Torch's fused attention cannot say it."""
        return self.sinks is not None or self.soft_cap is not None or self.kv_scales is not None

    def fits(self, q: Tensor) -> bool:
        """q [..., heads, head_dim]"""
        scale, window, sinks, soft_cap, _ = self
        return (
            scale > 0
            and (window is None or window > 0)
            and (soft_cap is None or soft_cap > 0)
            and (sinks is None or (sinks.shape == q.shape[-2:-1] and sinks.dtype in (q.dtype, torch.float32)))
            and (sinks is None or sinks.is_contiguous())
        )

    def look_at(self, call: Call, q: Tensor) -> None:
        """Its scales are the cache's (paged.py)."""
        if self.sinks is not None:
            call.tensor("sinks", self.sinks, "heads", (q.dtype, torch.float32), dense=1)
        call.require("scale", self.scale > 0, f"is {self.scale}, wanted a positive number")
        call.require(
            "window", self.window is None or self.window > 0, f"is {self.window}: a token sees at least itself"
        )
        positive = self.soft_cap is None or self.soft_cap > 0
        call.require("soft_cap", positive, f"is {self.soft_cap}, wanted a positive number, or None for none")
