"""Stored invocations of a function: a router's query, and the records for commands and pages."""

from typing import Annotated

import msgspec
from msgspec import Meta

LOGS_PATH = "/internal/functions/logs"  # router -> site, with a LogQuery as the body
MAX_LIMIT = 1000
OUTCOMES = ("ok", "exception", "exceededCpu", "exceededMemory", "canceled")  # Cloudflare's words

Status = Annotated[str, Meta(pattern=r"^(error|[1-5]xx|[1-5][0-9]{2}|" + "|".join(OUTCOMES) + r")\Z")]


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query for a function's invocations: the newest `limit`, or with `seq` the oldest after it."""

    function: Annotated[str, Meta(max_length=100)]
    since_s: float = 0.0  # since the epoch, of their beginning
    grep: Annotated[str, Meta(max_length=500)] = ""  # text in a line, an exception, a path
    status: Status | None = None  # an outcome, an HTTP status such as 404 or 5xx, or `error` for every failure and 5xx
    after: int = 0  # a `seq` of this site: only later records
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 100


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    level: str  # `log`, or `error` for standard error
    text: str


class LoggedInvocation(msgspec.Struct, frozen=True):
    seq: int  # of this site: grows in the order in which invocations ended
    id: str
    function: str
    version: str  # the first digits of its SHA-256; empty if it was not deployed
    at_s: float  # of its beginning, since the epoch
    wall_ms: float
    cpu_ms: float
    trigger: str  # fetch, scheduled, queue, rpc, alarm, tail; `process` for output outside of requests
    what: str  # method and path, cron expression, queue, method
    status: int | None
    outcome: str
    error: str = ""  # name and sentence of the exception
    detail: str = ""  # its traceback
    lines: tuple[LogLine, ...] = ()
    site: str = ""


class FoundLogs(msgspec.Struct, frozen=True):
    """Router -> client: in the order in which they began.
    `after` is the `seq` up to which each site was read."""

    invocations: list[LoggedInvocation]
    after: dict[str, int]
    unread: dict[str, str]  # sites that could not be asked, and why
