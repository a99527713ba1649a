"""Tail consumers: functions that get other functions' invocations, as Cloudflare's TraceItems.

A manifest names them as `tail_consumers`. Events are sent in batches after invocations have ended; nothing waits for them. A slow or failing consumer
loses events, and its own log has the reason.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.invocations.invocation import Invocation

MAX_WAITING = 1000  # maximum number of queued events per consumer; then the oldest are dropped
MAX_BATCH = 100
MAX_LINES = 256  # per invocation, as on the platform
SECRET_HEADERS = ("auth", "cookie", "key", "token", "secret", "jwt")

log = logging.getLogger("pilotlight.function")
Ask = Callable[[str, frames.TailEvent], Awaitable[Any]]


class TailConsumers:
    def __init__(self, ask: Ask) -> None:
        """`ask` sends an event to a function, and raises Failure."""
        self._ask = ask
        self._waiting: dict[str, deque[dict[str, Any]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by consumer
        self._unheard: set[str] = set()  # consumers whose failure was logged

    def send(self, consumer: str, item: dict[str, Any]) -> None:
        self._waiting.setdefault(consumer, deque(maxlen=MAX_WAITING)).append(item)
        if consumer not in self._tasks:
            self._tasks[consumer] = asyncio.create_task(self._deliver(consumer), name=f"tail events for {consumer}")

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, consumer: str) -> None:
        waiting = self._waiting[consumer]
        try:
            while waiting:
                batch = [waiting.popleft() for _ in range(min(len(waiting), MAX_BATCH))]
                try:
                    await self._ask(consumer, frames.TailEvent(frames.UNNUMBERED, batch))
                    self._unheard.discard(consumer)
                except Failure as failure:
                    if consumer not in self._unheard:
                        log.warning("the tail consumer %s does not get its events: %s", consumer, failure.message)
                    self._unheard.add(consumer)
                except Exception:  # an error of this site: later events must still be delivered
                    log.exception("%d events for the tail consumer %s are lost", len(batch), consumer)
        finally:
            del self._tasks[consumer]
            if not waiting:
                self._waiting.pop(consumer, None)


def trace_item(invocation: Invocation, function: str, version: str) -> dict[str, Any]:
    """Return an invocation as a TraceItem.
    See https://developers.cloudflare.com/workers/runtime-apis/handlers/tail/."""
    at_ms = round(invocation.started_s * 1000)
    name, _, sentence = invocation.error.partition(": ")
    return {
        "scriptName": function,
        "scriptVersion": {"id": version} if version else None,
        "entrypoint": getattr(invocation.event, "entrypoint", "default"),
        "outcome": invocation.outcome,
        "event": _event(invocation),
        "eventTimestamp": at_ms,
        "wallTime": round(invocation.wall_s * 1000),
        "cpuTime": round(invocation.cpu_s * 1000),
        "logs": [
            {"timestamp": round(at_s * 1000), "level": level, "message": [text]}
            for at_s, level, text in invocation.printed[:MAX_LINES]
        ],
        "exceptions": (
            [{"name": name, "message": sentence, "stack": invocation.detail, "timestamp": at_ms}] if name else []
        ),
        "diagnosticsChannelEvents": [],
        "truncated": len(invocation.printed) > MAX_LINES,
    }


def _event(invocation: Invocation) -> dict[str, Any]:
    event = invocation.event
    match event:
        case frames.FetchEvent():
            headers = {
                name: "REDACTED" if any(word in name for word in SECRET_HEADERS) else value
                for name, value in event.headers
            }
            url = urlsplit(event.url)._replace(query="").geturl()
            answered = {} if invocation.status is None else {"response": {"status": invocation.status}}
            return {
                "request": {"method": event.method, "url": url, "headers": headers, "cf": event.options.get("cf")},
                **answered,
            }
        case frames.ScheduledEvent():
            return {"cron": event.cron, "scheduledTime": event.scheduled_time_ms}
        case frames.QueueEvent():
            return {"queue": event.queue, "batchSize": len(event.messages)}
        case frames.RpcEvent():
            return {"rpcMethod": event.method}
    return {}
