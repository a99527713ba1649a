"""Tail consumers: functions that get other functions' invocations, as Cloudflare's TraceItems.

A manifest names them as `tail_consumers`. Events are sent in batches after invocations have ended; nothing waits for them. A slow or failing consumer
loses events, and its own log has the reason.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.invocations.invocation import Invocation

MAX_WAITING = 1000  # maximum number of queued events per consumer; then the oldest are dropped and counted
MAX_WAITING_BYTES = 32 << 20  # the same for their memory
LINE_BYTES = 512  # memory of an event or a line besides its text
MAX_BATCH = 100
MAX_LINES = 256  # per invocation, as on the platform
SECRET_HEADERS = ("auth", "cookie", "key", "token", "secret", "jwt")

log = logging.getLogger("pilotlight.function")
Ask = Callable[[str, frames.TailEvent], Awaitable[Any]]


class TailConsumers:
    def __init__(self, ask: Ask, max_bytes: int = MAX_WAITING_BYTES) -> None:
        """`ask` sends an event to a function, and raises Failure.

        `max_bytes` limits the memory of one consumer's queue."""
        self.num_dropped = 0
        self._ask = ask
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[dict[str, Any]]] = {}
        self._waiting_bytes: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by consumer
        self._unheard: set[str] = set()  # consumers whose failure was logged

    def send(self, consumer: str, item: dict[str, Any]) -> None:
        waiting = self._waiting.setdefault(consumer, deque())
        waiting.append(item)
        self._waiting_bytes[consumer] += _memory_of(item)
        while len(waiting) > MAX_WAITING or self._waiting_bytes[consumer] > self._max_bytes:
            self._next(consumer)
            self.num_dropped += 1
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
                batch = [self._next(consumer) for _ in range(min(len(waiting), MAX_BATCH))]
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
                del self._waiting_bytes[consumer]

    def _next(self, consumer: str) -> dict[str, Any]:
        """Remove the oldest event from a consumer's queue, and return it."""
        item = self._waiting[consumer].popleft()
        self._waiting_bytes[consumer] -= _memory_of(item)
        return item


def _memory_of(item: dict[str, Any]) -> int:
    """Return about how many bytes of memory an event takes."""
    lines, exceptions = item["logs"], item["exceptions"]
    texts = sum(len(line["message"][0]) for line in lines) + sum(len(each["stack"]) for each in exceptions)
    return texts + LINE_BYTES * (1 + len(lines))


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
