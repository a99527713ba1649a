"""The stages of a request besides its forwarding, as configured.

A stage opens when a request is known, may refuse it, and returns the function that closes it at the request's end.
"""

from collections.abc import Iterator
from functools import partial

from pilotlight.edge_router.admission.filter import EXPECTED_TOKENS, TenantLimits
from pilotlight.edge_router.forwarding.request_state import Close, RequestState, Stage
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.objectives import Objectives
from pilotlight.edge_router.routing.selection import SiteSelector
from pilotlight.edge_router.telemetry.tracing import Tracing
from pilotlight.wire.hop.usage import NOTHING_USED


class Stages:
    """The stages of one router; `present` returns those that the current configuration needs."""

    def __init__(
        self,
        limits: TenantLimits,
        accounting: Accounting,
        selector: SiteSelector,
        objectives: Objectives | None,
        tracing: Tracing | None,
    ) -> None:
        """Set up the stages; `objectives` and `tracing` may be None."""
        self._limits = limits
        self._accounting = accounting
        self._selector = selector
        self._objectives = objectives
        self._tracing = tracing

    def present(self) -> tuple[Stage, ...]:
        return tuple(self._asked_for())

    def _asked_for(self) -> Iterator[Stage]:
        if self._tracing is not None:
            yield partial(_trace, self._tracing)
        if self._objectives is not None:
            yield partial(_judge, self._objectives, self._selector)
        if self._limits.counts_tokens:
            yield partial(_reserve_tokens, self._limits)
        if self._limits.restricts_models:
            yield _check_model
        if self._accounting.ledger is not None:
            yield partial(_charge, self._accounting, self._selector)


async def _trace(tracing: Tracing, proxied: RequestState) -> Close:
    proxied.follow(tracing.begin(proxied.request))
    return lambda error, _: proxied.end_trace(error)


async def _judge(objectives: Objectives, selector: SiteSelector, proxied: RequestState) -> Close | None:
    request = proxied.request
    if (model := request.model) is None or request.head.is_for_batch:
        return None
    return lambda error, took_s: objectives.count(proxied, selector.own_name(model), error, took_s)


async def _reserve_tokens(limits: TenantLimits, proxied: RequestState) -> Close:
    """Reserve the tokens that the request may use; settle the reservation with the actual usage.
    An answer that another router has started is continued even if the limit is reached."""
    request = proxied.request
    tokens = request.expected_tokens(EXPECTED_TOKENS)
    reserved = await limits.reserve(request.head, tokens, may_refuse=not proxied.is_continued)

    def settle(_: BaseException | None, __: float) -> None:
        prompt = request.conversation.tokens if proxied.is_admitted else 0
        limits.settle(reserved, prompt + proxied.delivered_tokens)

    return settle


async def _check_model(proxied: RequestState) -> None:
    request, head = proxied.request, proxied.request.head
    if head.holder is not None and head.method == "POST" and not head.is_for_function:
        head.holder.account.check_model(request.asked_model)


async def _charge(accounting: Accounting, selector: SiteSelector, proxied: RequestState) -> Close | None:
    """Record the request's usage in the ledger, and count it against its account's day."""
    charge = await accounting.begin(proxied.request, selector.own_names, is_continued=proxied.is_continued)
    if charge is None:
        return None
    proxied.log.count_on(charge.meter)

    def end(_: BaseException | None, took_s: float) -> None:
        if proxied.is_left:
            charge.meter.count(NOTHING_USED)
        accounting.end(charge, is_complete=proxied.is_complete, took_s=took_s)

    return end
