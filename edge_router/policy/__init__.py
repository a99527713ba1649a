"""What every policy is given and what it returns. A policy is one file and one method: `rank(request, backends) -> preferences`.

A policy sees frozen snapshots, no sockets and no clock, so that a simulator can ask it the same questions. Failover is "the next preference".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from wire.status import ModelStatus, Place, SiteStatus

State = Literal["unknown", "healthy", "unhealthy", "draining"]
USABLE: tuple[State, ...] = ("healthy", "unknown")  # a router that has just started asks before it knows


@dataclass(frozen=True, slots=True)
class Home:
    """The site that answered this conversation before and still holds its beginning in its prefix cache."""

    site: str
    cached_tokens: int
    by_name: (
        bool  # the client named the session itself, so it asked to stay; otherwise the router recognised its messages
    )


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """All a policy may know of a request."""

    model: str | None = None
    prompt_tokens: int = 0  # an estimate
    placement_key: bytes | None = None  # equal for all turns of one conversation, different between tenants
    home: Home | None = None
    client: Place | None = None  # None: beside the router

    def uncached_tokens(self, site: str) -> int:
        cached = self.home.cached_tokens if self.home is not None and self.home.site == site else 0
        return max(0, self.prompt_tokens - cached)


@dataclass(frozen=True, slots=True)
class BackendView:
    """A site at the moment of a decision."""

    name: str
    state: State
    place: Place
    rtt_ms: float  # between router and site
    seed_rtt_ms: float  # the same, had it never been measured
    outstanding: int = 0  # this router's requests under way there
    pending_requests: int = 0  # of these, sent since the site published its status, and not yet answering
    pending_tokens: int = 0  # their prompt tokens
    status: SiteStatus | None = None
    status_is_fresh: bool = False

    def model(self, name: str) -> ModelStatus | None:
        if self.status is None:
            return None
        return next((model for model in self.status.models if name == model.name or name in model.aliases), None)

    @property
    def is_usable(self) -> bool:
        return self.state in USABLE

    @property
    def occupancy(self) -> float | None:
        """Share of the site's permits in use, what was sent since included. None: nobody has said lately."""
        if self.status is None or not self.status_is_fresh or self.status.max_inflight <= 0:
            return None
        return (self.status.inflight + self.pending_requests) / self.status.max_inflight


@dataclass(frozen=True, slots=True)
class Preference:
    """One place in the order of preference, with the reasons for it."""

    backend: BackendView
    cost_ms: float
    terms: dict[str, float]
    reason: str


class Policy(Protocol):
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        """The sites to try, best first. Empty when none is usable."""
        ...


def eligible(request: RouteRequest, backends: Sequence[BackendView]) -> list[BackendView]:
    """The usable sites that serve the model, or may serve it; all usable ones if no site does, so that one of them can say so."""
    usable = [backend for backend in backends if backend.is_usable]
    if request.model is None:
        return usable
    serving = [backend for backend in usable if _may_serve(backend, request.model)]
    return serving or usable


def _may_serve(backend: BackendView, name: str) -> bool:
    if backend.status is None:
        return True
    model = backend.model(name)
    return model is not None and model.residency != "failed"
