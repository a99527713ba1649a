"""The choice of sites: the next site of a request, when to leave a site, and what an attempt shows.

Joins the policy, the known sites, the session table and the retry budget. A site must be silent for many times its published interval between tokens
before another one is asked. Probes do not show such a site: over a lossy link, or with a frozen engine, it answers probes while its streams stand
still. This module sends nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from pilotlight.edge_router.backends.backend import Backend, Ticket
from pilotlight.edge_router.backends.wake_hints import WakeHints
from pilotlight.edge_router.forwarding.request_state import RequestState, RetryBudget
from pilotlight.edge_router.forwarding.site_failure import SiteFailed
from pilotlight.edge_router.forwarding.upstream import UpstreamResponse
from pilotlight.edge_router.requests.request import FUNCTIONS, ValidRequest
from pilotlight.edge_router.requests.session import SessionTable
from pilotlight.edge_router.routing.data_places import AllowedSites, DataPlaces, refusal
from pilotlight.edge_router.routing.views import (
    BackendView,
    Policy,
    Preference,
    RouteRequest,
    having_by_name,
    is_named,
    may_serve,
)
from pilotlight.edge_router.services.finetune_registry import SiteFinetunes
from pilotlight.edge_router.telemetry.metrics import RouterMetrics
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.status import ModelStatus

MAX_RETRY_AFTER_S = 60.0
TRY_AGAIN_S = 0.5  # pause between two rounds over the sites, while no site can continue a cut stream
INTERVALS = 50  # decode steps within which a site must send a token: other prompts come between, and a sequence may be preempted
# a stream may wait for its first token this many times the predicted time, because predictions are averages
TIMES = 4.0

Rank = Callable[[ValidRequest], tuple[RouteRequest, list[Preference]]]

log = logging.getLogger(__name__)


class SiteSelector:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        policy: Policy,
        sessions: SessionTable,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        places: DataPlaces,
        finetunes: SiteFinetunes,
        hints: WakeHints,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        self.backends = backends
        self.places = places
        self.finetunes = finetunes
        self.retries = RetryBudget(clock)
        self._hints = hints
        self._policy = policy
        self._sessions = sessions
        self._metrics = metrics
        self._clock = clock
        self._try_again_s = try_again_s

    def rank(self, request: ValidRequest) -> tuple[RouteRequest, list[Preference]]:
        route = request.route(self._sessions.recall(request.conversation), self._clock())
        ranking = self._policy.rank(route, self._views(request))
        if request.wished_site:
            ranking.sort(key=lambda preference: preference.backend.name != request.wished_site)
            if ranking and ranking[0].backend.name == request.wished_site:
                ranking[0] = replace(ranking[0], reason="asked for", max_queue_ms=None)
        return route, ranking

    def _views(self, request: ValidRequest) -> list[BackendView]:
        """Return the sites that may see the request and have its function or its uploaded adapter.

        If no site publishes the function, return the sites that have never published a status, because one of them may have it, or else all sites.
        """
        asked: Iterable[Backend] = self.backends.values()
        if request.head.is_for_function:
            asked = self._serving(request) or [backend for backend in asked if backend.status is None] or asked
        views = [backend.view() for backend in asked]
        if not self.finetunes.is_empty and (holders := self.finetunes.asked_by(request)):
            views = [view for view in views if view.name in holders]
        allowed = self._allowed(request)
        return views if allowed is None else [view for view in views if view.name in allowed.names]

    def _serving(self, request: ValidRequest) -> list[Backend]:
        """Return the sites that publish the request's function."""
        name = request.head.path.removeprefix(FUNCTIONS).partition("/")[0]
        return [backend for backend in self.backends.values() if name in backend.published.functions]

    def _allowed(self, request: ValidRequest) -> AllowedSites | None:
        if self.places.is_empty:
            return None
        return self.places.allowed(request, None if request.model is None else self.own_name(request.model))

    def own_name(self, model: str) -> str:
        """Return the model's own name for its name or alias.
        If no site knows the model, return `model` itself."""
        return self.own_names(model)[0]

    def own_names(self, model: str) -> tuple[str, str]:
        """Return `own_name`, and the name of the requested adapter; empty if there is none."""
        if (known := self.known_model(model)) is None:
            return model, ""
        return known.name, "" if is_named(model, known) else model.rpartition(":")[2]

    def known_model(self, name: str) -> ModelStatus | None:
        """Return the first site's model with this name or alias.
        If no site has one, return the model of which the name may be an adapter's."""
        base = None
        for backend in self.backends.values():
            if (known := backend.view().model(name)) is not None:
                if is_named(name, known):
                    return known
                base = base or known
        return base

    async def next_site(self, proxied: RequestState) -> tuple[RouteRequest, Preference] | None:
        """Return the best site not yet tried; None if none is left.
        Sites are ranked again each time, because some may have failed or returned since."""
        tries, is_new = proxied.tries, proxied.recovery.lost is None
        if tries.repeated and is_new:
            return None
        if tries.failures and is_new and not (tries.is_paid or self.retries.withdraw(proxied.request.head.owner)):
            return None
        tries.is_paid = False
        while not proxied.is_out_of_tries(self._clock()):
            route, preferences = self.rank(proxied.request)
            if len(preferences) > 1 and proxied.is_at_first_try:
                self._hints.consider(route.model, preferences)
            for preference in preferences:
                if preference.backend.name not in tries.excluded:
                    return route, preference
            if tries.readmit_declined():
                continue
            if (last := self._last_resort(proxied.request, route, tries.excluded)) is not None:
                return route, last
            if is_new:
                return None
            await asyncio.sleep(self._try_again_s)
            tries.try_again()
        return None

    def _last_resort(self, request: ValidRequest, route: RouteRequest, excluded: set[str]) -> Preference | None:
        """Return the best site that is not excluded, when the ranking is used up; None if none has the model.

        Such sites are those that missed probes, or whose last answers failed. A site without the model is never returned.
        """
        views = [view for view in having_by_name(self._views(request), route.model) if view.name not in excluded]
        preferences = self._policy.rank(route, [view for view in views if may_serve(view, route.model)])
        return preferences[0] if preferences else None

    def is_wanted_elsewhere(self, proxied: RequestState, backend: Backend) -> bool:
        """Tell whether a draining site's stream has a healthy site to go to.
        This is checked from time to time; as long as no site can take the stream, the draining site continues it."""
        backend.refused_draining()
        now = self._clock()
        if now < proxied.look_again_at:
            return False
        proxied.look_again_at = now + self._try_again_s
        if not (proxied.recovery.may_be_handed_over and proxied.can_continue_elsewhere):
            return False
        return _has_healthy_site(self.rank(proxied.request)[1], proxied.request.model)

    def note_failure(self, backend: Backend, ticket: Ticket, request: ValidRequest, failure: SiteFailed) -> None:
        """Record what a failed attempt shows about its site."""
        log.info("site %s failed before its first byte: %s", backend.name, failure.detail)
        self._metrics.tried(backend.name, failure.kind)
        if failure.kind == "declined":
            ticket.refused()  # the refusal shows that it is alive
            backend.declined(request.model or "", failure.queued_tokens, ticket.sent_at)
        elif failure.kind == "no_model" or (failure.kind == "full" and request.head.is_for_function):
            ticket.refused()  # the site's other models and functions may be fine
        elif failure.kind == "failing":
            ticket.is_undecided = True  # decided when another site has answered the same request, or not
        elif failure.kind in ("untrusted", "no_files"):
            # the site's probes, which are signed too, will show a wrong secret; this router's own limits are not the site's fault
            ticket.refused()
        elif failure.kind == "connect":
            backend.failed(failure.detail)
        elif failure.kind == "draining":
            backend.refused_draining()

    def note_answer(
        self, proxied: RequestState, preference: Preference, response: UpstreamResponse, elapsed_s: float
    ) -> None:
        """Record what an answer's start shows: where the conversation is cached, and the prediction's error."""
        self._metrics.tried(preference.backend.name, "answered")
        self._metrics.decided(preference)
        if response.failure is None:
            for site, failure in proxied.tries.failures.items():
                if failure.kind == "failing":
                    self.backends[site].failed_plainly()
        if response.status < 400:
            self._sessions.learn(proxied.request.conversation, preference.backend.name)
            if response.body is None and proxied.is_at_first_try:
                self._metrics.first_token(preference, elapsed_s)
                if (expected_ms := proxied.expected_ms(preference)) is not None:
                    self.backends[preference.backend.name].first_token(expected_ms, 1000 * elapsed_s)

    def nothing_left(self, request: ValidRequest, failures: Mapping[str, SiteFailed], repeated: str = "") -> ApiError:
        """Return the error of a request that no site has answered.
        `repeated` is the error with which two sites failed alike."""
        if repeated:
            return ApiError("engine_error", f"two sites failed in the same way, so no other was asked: {repeated}")
        if (allowed := self._allowed(request)) is not None:
            told = [f"{site}: {failure.detail}" for site, failure in failures.items()]
            known = [each for each in self.backends.values() if each.name in allowed.names]
            return refusal(
                allowed, "; ".join(told or [f"{each.name} is {each.state}: {each.detail}" for each in known])
            )
        if failures:
            tried = "; ".join(f"{site}: {failure.detail}" for site, failure in failures.items())
            sentence = f"no site could answer; tried: {tried}"
        else:
            states = "; ".join(f"{each.name} is {each.state}: {each.detail}" for each in self.backends.values())
            sentence = f"no site is available; {states}"
        if request.head.is_for_function and len(home := self._serving(request)) == 1:
            sentence += f"; this function runs at {home[0].name} only"
        hints = [failure.retry_after_s for failure in failures.values() if failure.retry_after_s is not None]
        return ApiError("no_site_available", sentence, retry_after_s=min([*hints, MAX_RETRY_AFTER_S]) if hints else 1.0)


def stall_limit_s(model: ModelStatus | None, stall_s: float) -> float:
    """Return how long a stream may be silent between two tokens, in seconds."""
    if model is None:
        return stall_s
    if model.decode_tokens_per_s > 0:
        stall_s = max(stall_s, INTERVALS / model.decode_tokens_per_s)
    if model.prefill_tokens_per_s > 0:
        stall_s += model.queued_tokens / model.prefill_tokens_per_s
    return stall_s


def first_token_limit_s(preference: Preference, name: str | None, stall_s: float) -> float:
    """Return how long a stream may be silent before its first token, in seconds.

    Infinite if nothing was measured or the model must wake first.
    """
    model = preference.backend.model(name) if name is not None else None
    if model is None or model.residency != "device" or model.prefill_tokens_per_s <= 0:
        return float("inf")
    expected_ms = sum([preference.terms.get(term, 0.0) for term in ("rtt", "queue_ahead", "prefill", "decode_step")])
    return max(stall_s, TIMES * expected_ms / 1000)


class AttemptPace(msgspec.Struct, frozen=True):
    """Decides when one request should leave one site."""

    proxied: RequestState
    backend: Backend
    config: RelayConfig
    rank: Rank
    retries: RetryBudget

    def is_frozen(self) -> bool:
        return self.backend.is_frozen

    def is_stalled(self, silent_s: float) -> bool:
        """Tell whether the stream is silent for longer than its site's pace explains, and can be moved."""
        proxied, model = self.proxied, self.proxied.request.model
        if silent_s < self.config.stall_s or model is None or not proxied.recovery.may_move:
            return False
        if silent_s < stall_limit_s(self.backend.view().model(model), proxied.recovery.stall_s):
            return False
        return self.may_move()

    def may_move(self) -> bool:
        """Tell whether another site can continue the stream."""
        return self.proxied.can_continue_elsewhere and self._has_other({self.backend.name})

    def first_stall_s(self, preference: Preference) -> float:
        request = self.proxied.request
        if request.is_generated_whole or request.head.is_for_function:
            return float("inf")
        return first_token_limit_s(preference, request.model, self.proxied.first_stall_s)

    def may_leave(self) -> bool:
        """Tell whether the request may leave before its first token.
        The next try is charged to the budget now, so that a request never leaves a site without being able to try another."""
        proxied, tries = self.proxied, self.proxied.tries
        if proxied.recovery.lost is not None:
            return True
        if len(tries.failures) + 1 >= self.config.max_tries or not proxied.request.head.may_be_repeated:
            return False
        owner = proxied.request.head.owner
        if self._has_other(tries.excluded | {self.backend.name}) and self.retries.withdraw(owner):
            tries.is_paid = True
        return tries.is_paid

    def _has_other(self, than: set[str]) -> bool:
        request = self.proxied.request
        others = [each for each in self.rank(request)[1] if each.backend.name not in than]
        return _has_healthy_site(others, request.model)


def _has_healthy_site(preferences: Iterable[Preference], model: str | None) -> bool:
    """Tell whether a healthy site is among the preferences that may have the model."""
    return any(each.backend.state == "healthy" and each.serves(model) for each in preferences)
