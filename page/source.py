"""The data that a page gets from its process: a router with its sites, or a single site."""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from pilotlight.wire.hop.status import FunctionsStatus, ModelStatus, Place, ProcessStatus


class TimeHistogram(msgspec.Struct, frozen=True):
    """Counts of times between bounds in milliseconds. The last count is for times above the last bound."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]


class Counts(msgspec.Struct, frozen=True):
    """Counters since the process's start, and two gauges: running, waiting."""

    requests: dict[str, int]  # ended requests by outcome: `ok`, or an error's code
    tokens: int  # output tokens, including those of open streams
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in a prefix cache
    first_token: TimeHistogram  # time from a request to its stream's first token
    token_gaps: TimeHistogram  # time between two tokens of a stream
    running: int = 0
    waiting: int = 0


class SiteRow(msgspec.Struct, frozen=True):
    """A site as the page shows it: its published status without digests of caches."""

    name: str
    state: Literal["unknown", "healthy", "unhealthy", "draining"]
    detail: str = ""  # reason why it is not healthy
    version: str = ""
    place: Place | None = None
    rtt_ms: float | None = None
    open_requests: int = 0  # open requests that the page's process has sent to the site
    inflight: int = 0
    max_inflight: int = 0
    models: tuple[ModelStatus, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    functions: FunctionsStatus | None = None
    uptime_s: float = 0.0  # rounded down to ten seconds, so that it rarely changes a row


def shown(model: ModelStatus) -> ModelStatus:
    """Return a model for the page, without digests, and without rates that change every second."""
    return replace(model, prefixes=b"", arriving_per_s=0.0, arriving_tokens_per_s=0.0)


def in_steps(uptime_s: float) -> float:
    return uptime_s // 10 * 10.0


class Move(msgspec.Struct, frozen=True):
    """The continuation of a stream at another site, after it lost its site."""

    number: int  # counted from the process's start
    from_site: str
    to_site: str
    cause: str
    waited_ms: float


class Decision(msgspec.Struct, frozen=True):
    """The predicted time to a stream's first token at its site, and the actual one."""

    number: int
    site: str
    reason: str
    terms: dict[str, float]  # parts of the prediction in ms
    predicted_ms: float
    actual_ms: float


class Source(Protocol):
    """The process that a page shows. Each method is called about once a second."""

    @property
    def name(self) -> str:
        """Name of the process: `router`, or a site's name."""

    @property
    def place(self) -> Place: ...

    @property
    def version(self) -> str: ...

    def counts(self) -> Counts: ...

    def sites(self) -> tuple[SiteRow, ...]: ...

    def moves(self) -> tuple[Move, ...]:
        """Return the newest moves, oldest first."""

    def decisions(self) -> tuple[Decision, ...]:
        """Return the newest decisions, oldest first."""


class FunctionsSource(Protocol):
    """The functions that a page shows."""

    def versions(self, *, is_admin: bool) -> bytes:
        """Return JSON: a list with the `name`, `versions` and traffic `shares` of each deployed function.
        Admins also get its `account` and `secret_names`."""

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        """Return JSON: a function's stored `invocations`, and the `unread` sites, which failed to answer.
        Raises ApiError for an invalid query."""

    def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield the lines that a function prints from now on, as events: `{"site", "line"}`.
        Raises ApiError for an unknown name."""
