"""Stored invocations of a function: a router's query, and the records for commands and pages."""

from typing import Annotated

import msgspec
from msgspec import Meta

LOGS_PATH = "/internal/functions/logs"  # router -> site, with a LogQuery as the body
MAX_LIMIT = 1000
OUTCOMES = ("ok", "exception", "exceededCpu", "exceededMemory", "canceled")  # Cloudflare's outcomes

STATUS = r"(error|[1-5]xx|[1-5][0-9]{2}|" + "|".join(OUTCOMES) + r")"
Status = Annotated[str, Meta(pattern=rf"^{STATUS}\Z")]


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query for a function's invocations: the newest `limit`, or with `after` the oldest after it."""

    function: Annotated[str, Meta(max_length=100)]
    since_s: float = 0.0  # only invocations that started at this time or later, in seconds since the epoch
    grep: Annotated[str, Meta(max_length=500)] = ""  # text in a line, in an exception or in the path
    status: Status | None = None  # an outcome, an HTTP status such as 404 or 5xx, or `error` for all failures and 5xx
    after: int = 0  # the `seq` of this site's last known record: only later ones are returned
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 100


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    level: str  # `log`, or `error` for standard error
    text: str


class LoggedInvocation(msgspec.Struct, frozen=True):
    seq: int  # number at its site, in the order in which invocations ended
    id: str
    function: str
    version: str  # the first digits of its SHA-256; empty if it was not deployed
    at_s: float  # start, in seconds since the epoch
    wall_ms: float
    cpu_ms: float
    trigger: str  # fetch, scheduled, queue, rpc, alarm, tail; `process` for output outside of requests
    what: str  # method and path, cron expression, queue, or method
    status: int | None
    outcome: str
    error: str = ""  # name and message of the exception
    detail: str = ""  # traceback of the exception
    lines: tuple[LogLine, ...] = ()
    site: str = ""


class FoundLogs(msgspec.Struct, frozen=True):
    """Router -> client: invocations in the order of their start.
    `after` has the `seq` up to which each site was read."""

    invocations: list[LoggedInvocation]
    after: dict[str, int]
    unread: dict[str, str]  # sites that could not be asked, with the reason
