"""Accounting of an admitted request: the models that its account may use, prices, and usage."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pilotlight.edge_router.admission.quotas.daily import DailyQuotas, Reserved
from pilotlight.edge_router.metering.ledger.ledger import Ledger
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.requests.request import ValidRequest
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.meters import MeterSlot
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import UsageRecord


class Charge(NamedTuple):
    """The accounting of one request in progress."""

    meter: MeterSlot
    reserved: Reserved | None


class Accounting:
    def __init__(self, prices: PriceList, ledger: Ledger | None, quotas: DailyQuotas) -> None:
        """Record usage in `ledger`; None to record nothing."""
        self.prices = prices
        self.ledger = ledger
        self.quotas = quotas
        if ledger is not None:
            for row in ledger.used_since(quotas.day_began_s):
                quotas.begin_with(row["account"], row["prompt_tokens"] + row["output_tokens"], row["cost"] or 0)
            for record in ledger.recovered:
                used, request = record.use, record.request
                cost = prices.cost(request.model, request.started_s, used)
                quotas.recovered(request.account, request.started_s, used.prompt + used.output, cost or 0)

    async def begin(
        self, request: ValidRequest, own_names: Callable[[str], tuple[str, str]], *, is_continued: bool = False
    ) -> Charge | None:
        """Start to count a request for a model.
        Return None without a ledger, and for requests that run no model. `own_names` are the names of the model and of its adapter, without aliases.
        An answer that another router has started is continued even if its quota is used up. Raises ApiError if too little
        of a quota is left, or usage cannot be recorded."""
        head = request.head
        if self.ledger is None or request.model is None or head.is_for_function or head.method != "POST":
            return None
        (model, adapter), reserved = own_names(request.model), None
        if head.holder is not None and not is_continued:
            most = ResourceUse(prompt=request.conversation.tokens, output=request.most_tokens)
            cost = self.prices.cost(model, self.quotas.now_s, most) or 0
            asked = head.holder.account.name, most.prompt + most.output, cost
            await self.quotas.ready(*asked)
            reserved = self.quotas.reserve(*asked)
        try:
            return Charge(self.ledger.begin(request, model, request.adapter or adapter), reserved)
        except ApiError:
            self.quotas.settle(reserved, 0, 0)
            raise

    def end(self, charge: Charge, *, is_complete: bool, took_s: float) -> None:
        assert self.ledger is not None, "it has started the charge"
        used, request = charge.meter.use, charge.meter.request
        cost = self.prices.cost(request.model, request.started_s, used) or 0
        if charge.reserved is not None:
            self.quotas.settle(charge.reserved, used.prompt + used.output, cost)
        elif request.account:
            self.quotas.count(request.account, request.started_s, used.prompt + used.output, cost)
        self.ledger.end(charge.meter, "complete" if is_complete else "cut", took_s)

    def count(self, records: Sequence[UsageRecord]) -> None:
        """Count usage of functions, which the ledger has already, against quotas."""
        for record in records:
            used, request = record.use, record.request
            cost = self.prices.cost(request.model, request.started_s, used) or 0
            self.quotas.count(request.account, request.started_s, used.prompt + used.output, cost)
