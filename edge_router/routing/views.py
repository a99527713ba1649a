"""The input and output of every policy.
A policy is one file with one method: `rank(request, backends) -> preferences`.

A policy sees frozen snapshots, no sockets and no clock, so that a simulator can use it. Failover is "the next preference". Snapshots are msgspec
structs because a decision makes several: each takes 0.1 us, a frozen dataclass of as many fields 1 us.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import msgspec

from pilotlight.wire.hop.status import ModelStatus, Place, SiteStatus

State = Literal["unknown", "healthy", "unhealthy", "draining"]
MAX_DECLINES = 2  # declines per request: the next site must accept it, however long its queue is
# States in which a site gets requests. A router that has just started does not wait for its first probe.
USABLE: tuple[State, ...] = ("healthy", "unknown")


class Home(msgspec.Struct, frozen=True):
    """The site that answered this conversation before and still holds its beginning in its prefix cache."""

    site: str
    cached_tokens: int
    # the client named the session itself, so it wants to keep its site; otherwise the router recognised its messages
    by_name: bool


class RouteRequest(msgspec.Struct, frozen=True):
    """All that a policy may know about a request."""

    model: str | None = None
    prompt_tokens: int = 0  # estimated number of tokens
    placement_key: bytes | None = None  # equal for all turns of one conversation, different between tenants
    home: Home | None = None
    client: Place | None = None  # None if it is near the router
    # site -> tokens of this prompt that this router has sent there
    held: Mapping[str, int] = msgspec.field(default_factory=dict)
    digests: tuple[tuple[int, int], ...] = ()  # (short digest of a prefix, tokens up to there), longest first
    now_s: float = 0.0  # time of the decision, on the clock of the views' times

    def sent_tokens(self, site: str) -> int:
        """Return how many tokens of this prompt the site has computed, as far as this router knows."""
        known, home = self.held.get(site, 0), self.home
        return known if home is None or home.site != site else max(known, home.cached_tokens)

    def uncached_tokens(self, site: str) -> int:
        return max(0, self.prompt_tokens - self.sent_tokens(site))


class BackendView(msgspec.Struct, frozen=True):
    """A site as the router knows it.
    It stays valid until something changes at the site; times are on the router's clock."""

    name: str
    state: State
    place: Place
    rtt_ms: float  # round trip between router and site
    seed_rtt_ms: float  # estimate of the round trip without measurements
    outstanding: int = 0  # this router's requests in progress there
    pending_requests: int = 0  # requests that were sent after the status and have not started to answer
    pending_tokens: int = 0  # prompt tokens of the pending requests
    pending_since_s: float = 0.0  # when the first pending request was sent
    # prompt tokens sent to the site after its oldest unanswered request; the status does not reduce them
    unanswered_tokens: int = 0
    lateness_ms: float = 0.0  # mean delay of its answers beyond this router's predictions
    # mean lateness without the most delayed answer; only this moves a conversation from its cache
    proven_lateness_ms: float = 0.0
    backlog_ms: float = 0.0  # published queue of its busiest model
    status: SiteStatus | None = None
    status_is_fresh: bool = False
    status_at_s: float = 0.0  # the time when the status was requested
    # short digests of prefixes that the site published as cached, of all its models
    prefixes: frozenset[int] = frozenset()
    is_ejected: bool = False  # its last answers were failures: it gets no requests while enough other sites are left
    slow_start: float = 1.0  # below 1 while it has only just (re)appeared: the share of new conversations that it takes

    def cached_tokens(self, request: RouteRequest) -> int:
        """Return the tokens of the prompt that a site has cached, by this router's requests or its digest."""
        sent = request.sent_tokens(self.name)
        if self.prefixes:
            for digest, tokens in request.digests:
                if tokens <= sent:
                    break
                if digest in self.prefixes:
                    sent = tokens
                    break
        return min(sent, request.prompt_tokens)

    def model(self, name: str) -> ModelStatus | None:
        """Return the model with this name or alias.
        Without one, return the model of which the name may be an adapter's."""
        base = None
        if self.status is not None:
            for model in self.status.models:  # a loop: a generator takes 20 us longer for the 25 sites of a decision
                if name == model.name or name in model.aliases:
                    return model
                if base is None and is_adapter_of(name, model):
                    base = model
        return base

    @property
    def is_usable(self) -> bool:
        return self.state in USABLE

    @property
    def occupancy(self) -> float | None:
        """Return the share of the site's permits in use, with requests sent since its status.

        Return None without a recent status.
        """
        if self.status is None or not self.status_is_fresh or self.status.max_inflight <= 0:
            return None
        return (self.status.inflight + self.pending_requests) / self.status.max_inflight


def is_named(name: str, model: ModelStatus) -> bool:
    return name == model.name or name in model.aliases


def is_adapter_of(name: str, model: ModelStatus) -> bool:
    """Tell whether a name has the form `MODEL:ADAPTER` for this model.
    Only the site knows whether the adapter exists."""
    if ":" not in name:
        return False
    base = name.rpartition(":")[0]
    return base == model.name or base in model.aliases


class Preference(msgspec.Struct, frozen=True):
    """A site in the order of preference, with the reasons for its place."""

    backend: BackendView
    cost_ms: float
    terms: dict[str, float]
    reason: str
    max_queue_ms: float | None = None  # a site with a longer queue should decline; None if any queue is accepted

    @property
    def expected_ms(self) -> float:
        """Return the predicted time until the first token reaches this router, without the terms for risk.

        It is based on the site's status and the requests sent since. The round trip is the router's own, even if sites are compared by the client's.
        """
        terms, rtt_ms = self.terms, self.backend.rtt_ms
        feared_ms = terms.get("doubt", 0.0) + terms.get("full", 0.0) + terms.get("lateness", 0.0)
        return self.cost_ms - feared_ms + (rtt_ms - terms.get("rtt", rtt_ms))

    def serves(self, model: str | None) -> bool:
        """Tell whether the site may have the model. (If no site has it, all are ranked.)"""
        return self.backend.status is None or model is None or self.backend.model(model) is not None

    def explained(self, tries: int) -> str:
        """Return the decision as a header: `site=ams1; cost=12.3; rtt=0.4; ...; tries=1; reason=home`."""
        return _explanation(tuple(self.terms)) % (
            self.backend.name, self.cost_ms, *self.terms.values(), tries, self.reason
        )  # fmt: skip


@lru_cache(64)  # all decisions of a policy have the same terms
def _explanation(terms: tuple[str, ...]) -> str:
    return "; ".join(["site=%s", "cost=%.1f", *(f"{name}=%.1f" for name in terms), "tries=%d", "reason=%s"])


class Policy(Protocol):
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        """Return the sites to try, best first; empty if none is usable."""


HEALTHY_FLOOR = 0.5  # ejections count only if this share of the usable sites is left: if many fail at once, they are rarely at fault


def eligible(request: RouteRequest, backends: Sequence[BackendView]) -> list[BackendView]:
    """Return the usable sites that serve the model, or may serve it as far as is known.

    If every site is known not to serve it, all sites count, so that one of them can refuse it with a reason. If no site is usable, return the
    unhealthy ones: a site that missed its probes may still answer, but a draining site certainly refuses. So a request for a model whose only site is
    away is never sent to other sites, which would call the model unknown.
    """
    if len(backends) == 1:  # there is no choice
        return list(backends) if backends[0].state in USABLE or backends[0].state == "unhealthy" else []
    serving = [backend for backend in having_by_name(backends, request.model) if may_serve(backend, request.model)]
    # Without a site that can serve the model, sites where it failed to load count: the next attempt may succeed.
    serving = (
        serving or [backend for backend in backends if request.model and backend.model(request.model)] or list(backends)
    )
    usable = [backend for backend in serving if backend.state in USABLE]
    usable = usable or [backend for backend in serving if backend.state == "unhealthy"]
    kept = [backend for backend in usable if not backend.is_ejected]
    return kept if len(kept) >= HEALTHY_FLOOR * len(usable) else usable


def having_by_name(backends: Sequence[BackendView], name: str | None) -> Sequence[BackendView]:
    """Return the sites that have a model with this name, if any; otherwise all sites.
    At the others it could only be an adapter's name. Sites without a status are kept."""
    if name is None or ":" not in name:
        return backends
    named = {each.name for each in backends if (known := each.model(name)) is not None and is_named(name, known)}
    return [each for each in backends if each.status is None or each.name in named] if named else backends


def may_serve(backend: BackendView, name: str | None) -> bool:
    if backend.status is None or name is None:
        return True
    may = False
    # A loop instead of BackendView.model() saves a call for each site of a large network.
    for model in backend.status.models:
        if name == model.name or name in model.aliases:
            return model.residency != "failed"
        may = may or (is_adapter_of(name, model) and model.residency != "failed")
    return may
