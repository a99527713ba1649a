"""One invocation of a function, from its event to the end of its response's stream."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import Failure
from pilotlight.support.logs import printable

# Cloudflare's outcomes, by a fault's code.
OUTCOMES = {"cpu_time": "exceededCpu", "memory": "exceededMemory", "cancelled": "canceled"}
MAX_WHAT = 500  # limit of the text that identifies an event, in characters
MAX_DETAIL = 8000


class Invocation:
    """The record of one invocation. `end` is called at least once; its first call counts."""

    def __init__(
        self, id: int, event: frames.FunctionEvent, on_end: Callable[["Invocation"], None], *, wants_lines: bool = False
    ) -> None:
        """`wants_lines` keeps the output for tail consumers."""
        self.id = id
        self.trigger, self.what = described(event)
        self.event = event if wants_lines else None
        self.started_s = time.time()
        self.wall_s = -1.0  # -1 while it is open
        self.cpu_s = 0.0
        self.status: int | None = None
        self.outcome, self.error, self.detail = "ok", "", ""
        self.printed: list[tuple[float, str, str]] = []  # Unix time in seconds, level and text of each line
        self._began = time.monotonic()
        self._on_end = on_end

    def answered(self, value: Any) -> None:
        """Record the HTTP status of a response."""
        status = value.get("status") if isinstance(value, dict) and self.trigger == "fetch" else None
        self.status = status if isinstance(status, int) else None

    def charge(self, cpu_s: float) -> None:
        self.cpu_s += cpu_s

    def end(self, error: BaseException | None = None, *, is_canceled: bool = False) -> None:
        """Close the record.
        `error` is the reason for a failure; an exception that is not a Failure means that the caller left."""
        if self.wall_s >= 0:
            return
        self.wall_s = time.monotonic() - self._began
        if isinstance(error, Failure):
            self.outcome = OUTCOMES.get(str(error.code), "exception")
            self.error, self.detail = f"{error.name}: {error.message}"[:MAX_DETAIL], error.detail[:MAX_DETAIL]
        elif error is not None or is_canceled:
            self.outcome = "canceled"
        self._on_end(self)


def described(event: frames.FunctionEvent) -> tuple[str, str]:
    """Return the trigger of an event, and a text that identifies it.
    The text omits the query of a URL, which may contain secrets."""
    match event:
        case frames.FetchEvent():
            name = f"{event.options['object']}: " if "object" in event.options else ""
            trigger, what = "fetch", f"{name}{event.method} {urlsplit(event.url).path or '/'}"
        case frames.ScheduledEvent():
            trigger, what = "scheduled", event.cron
        case frames.QueueEvent():
            trigger, what = "queue", f"{event.queue} ({len(event.messages)})"
        case frames.RpcEvent():
            trigger = "alarm" if event.method == "alarm" and event.options.get("internal") is True else "rpc"
            what = f"{event.options.get('object', event.entrypoint)}.{event.method}"
        case frames.TailEvent():
            trigger, what = "tail", f"{len(event.events)} invocations"
    return trigger, printable(what[:MAX_WHAT])
