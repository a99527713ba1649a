"""The data that a page reads from its process: a router with its sites, or a single site."""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from pilotlight.wire.hop.status import FunctionsStatus, ModelStatus, Place, ProcessStatus


class TimeHistogram(msgspec.Struct, frozen=True):
    """Counts of times in milliseconds.
    There is one more count than bounds, for times above the last bound."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]


class Counts(msgspec.Struct, frozen=True):
    """Counters since the process's start, and two gauges: running, waiting."""

    requests: dict[str, int]  # ended requests by outcome: `ok`, or an error's word
    tokens: int  # of answers, those of open streams included
    prompt_tokens: int
    cached_tokens: int  # of these, found in a prefix cache
    first_token: TimeHistogram  # of streams: from the request to its first token
    token_gaps: TimeHistogram  # from one token of a stream to its next
    running: int = 0
    waiting: int = 0


class SiteRow(msgspec.Struct, frozen=True):
    """A site as the page shows it: its published status without digests of caches."""

    name: str
    state: Literal["unknown", "healthy", "unhealthy", "draining"]
    detail: str = ""  # why it is not healthy
    version: str = ""
    place: Place | None = None
    rtt_ms: float | None = None
    open_requests: int = 0  # of the process that serves the page
    inflight: int = 0
    max_inflight: int = 0
    models: tuple[ModelStatus, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    functions: FunctionsStatus | None = None
    uptime_s: float = 0.0  # in steps of ten seconds, so that a row changes only when something else does


def shown(model: ModelStatus) -> ModelStatus:
    """Return a model for the page: without digests, and without rates that change every second."""
    return replace(model, prefixes=b"", arriving_per_s=0.0, arriving_tokens_per_s=0.0)


def in_steps(uptime_s: float) -> float:
    return uptime_s // 10 * 10.0


class Move(msgspec.Struct, frozen=True):
    """A stream that lost its site and continued at another one."""

    number: int  # counts from the process's start
    from_site: str
    to_site: str
    cause: str
    waited_ms: float


class Decision(msgspec.Struct, frozen=True):
    """The prediction for a stream at its site, and its actual time to the first token."""

    number: int
    site: str
    reason: str
    terms: dict[str, float]  # ms
    predicted_ms: float
    actual_ms: float


class Source(Protocol):
    """The process that a page shows. Each method is called about once a second."""

    @property
    def name(self) -> str:
        """The process: `router`, or a site's name."""

    @property
    def place(self) -> Place: ...

    @property
    def version(self) -> str: ...

    def counts(self) -> Counts: ...

    def sites(self) -> tuple[SiteRow, ...]: ...

    def moves(self) -> tuple[Move, ...]:
        """Return the newest ones, oldest first."""

    def decisions(self) -> tuple[Decision, ...]:
        """Return the newest ones, oldest first."""


class FunctionsSource(Protocol):
    """The functions that a page shows."""

    def versions(self, *, is_admin: bool) -> bytes:
        """Return JSON: of each deployed function its `name`, `versions` and `shares` of the traffic.
        Admins also get its `account` and `secret_names`."""

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        """Return JSON: the kept `invocations` of a function, and the sites that are `unread`.
        Raises ApiError for an invalid query."""

    def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        """Iterate over the lines that a function prints from now on, as events: `{"site", "line"}`.
        Raises ApiError for an unknown name."""
