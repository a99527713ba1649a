"""A streaming client that records when each event of a request arrived.

Uses aiohttp and the project's own SSE decoder.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from pilotlight.wire.sse import EventDecoder


@dataclass
class StreamTimes:
    """One streamed request, in seconds of a monotonic clock since it was sent."""

    status: int = 0
    ttft_s: float | None = None  # from sending to the first event that carries text or a tool call
    arrivals_s: list[float] = field(default_factory=list)  # times of all events with text or a tool call
    e2el_s: float = 0.0  # from sending to the last byte
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finished: bool = False  # the stream ended without an error
    error: str | None = None


async def stream_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> StreamTimes:
    """Send one chat completion and read it to its end; a failure is recorded, not raised."""
    times = StreamTimes()
    decoder = EventDecoder()
    sent = time.perf_counter()
    payload = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=payload, headers={"content-type": "application/json"}
        ) as answer:
            times.status = answer.status
            if answer.status != 200:
                times.error = (await answer.text())[:500]
                return times
            async for chunk in answer.content.iter_any():
                now = time.perf_counter() - sent
                for event in decoder.feed(chunk):
                    _take(times, event.data, event.is_done, now)
    except (aiohttp.ClientError, TimeoutError) as error:
        times.error = f"{type(error).__name__}: {error}"
    times.e2el_s = time.perf_counter() - sent
    return times


def _take(times: StreamTimes, data: bytes | None, is_done: bool, now_s: float) -> None:
    if is_done:
        times.finished = True
    elif data is not None:
        message = orjson.loads(data)
        if "error" in message:
            times.error = str(message["error"])
            return
        times.usage = message.get("usage") or times.usage
        for choice in message.get("choices", ()):
            delta = choice["delta"]
            if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                times.text += delta.get("content") or ""
                times.arrivals_s.append(now_s)
                times.ttft_s = now_s if times.ttft_s is None else times.ttft_s
