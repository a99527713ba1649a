"""Prices per million tokens of a model, each valid from a time, and prices in model lists.

Sums are integers, billionths of the currency, so that they do not depend on the order of addition.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from pilotlight.sites.network import PriceConfig
from pilotlight.wire.hop.usage import ResourceUse

BILLIONTHS = 1_000_000_000
TOKENS = 1_000_000
MOST_MODELS = 4096  # entries of the cache, because a client may use any model name
_ALWAYS = datetime(1, 1, 1, tzinfo=UTC)


class PriceList:
    def __init__(self, prices: Sequence[PriceConfig], currency: str, most_models: int = MOST_MODELS) -> None:
        self.currency = currency
        self._most_models = most_models
        # A stable sort: of prices with the same start, the first in the file counts.
        self._newest_first = sorted(prices, key=lambda price: price.valid_from or _ALWAYS, reverse=True)
        self._of_model: dict[str, list[PriceConfig]] = {}  # the prices of each model, because matching patterns is slow

    def update_from(self, other: "PriceList") -> None:
        """Copy the other list's prices."""
        self.currency, self._newest_first, self._of_model = other.currency, other._newest_first, {}

    def __bool__(self) -> bool:
        return bool(self._newest_first)

    def price(self, model: str, at_s: float) -> PriceConfig | None:
        """Return the newest price of a model that is valid at a time (seconds since the epoch), or None."""
        fitting = self._of_model.get(model)
        if fitting is None:
            fitting = [price for price in self._newest_first if fnmatchcase(model, price.model)]
            if len(self._of_model) < self._most_models:
                self._of_model[model] = fitting
        for price in fitting:
            if price.valid_from is None or price.valid_from.timestamp() <= at_s:
                return price
        return None

    def cost(self, model: str, at_s: float, use: ResourceUse) -> int | None:
        price = self.price(model, at_s)
        if price is None:
            return None
        cached = price.input if price.cached_input is None else price.cached_input
        sums = ((use.prompt - use.cached) * price.input + use.cached * cached + use.output * price.output) * (
            BILLIONTHS // TOKENS
        )
        return round(sums)

    def listed(self, model: str, at_s: float) -> dict[str, Any] | None:
        """Return a model's price in the form of model lists: decimal strings, per token; None without a price."""
        price = self.price(model, at_s)
        if price is None:
            return None
        cached = price.input if price.cached_input is None else price.cached_input
        each = {"prompt": price.input, "input_cache_read": cached, "completion": price.output}
        return {name: _of_one(value) for name, value in each.items()} | {"currency": self.currency}


def _of_one(per_million: float) -> str:
    return f"{per_million / TOKENS:.15f}".rstrip("0").rstrip(".")
