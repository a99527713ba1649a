"""A client that costs little itself: prebuilt request bytes, answers parsed only for timestamps.

Closed loop: for a given time, each of a number of connections sends the next request as soon as it has its answer. Independent of the
measured router.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

MODEL = "trivial"
_MOMENT = re.compile(rb'"content":\s?"t(\d+)"')  # a token's text is the time when the site wrote it (trivial_site.py)


@dataclass
class Heard:
    """The answers of one measurement; times in milliseconds."""

    whole_ms: list[float] = field(default_factory=list)  # for each answer, the time from its request to its end
    first_ms: list[float] = field(default_factory=list)  # for each stream, the time from its request to its first token
    token_ms: list[float] = field(default_factory=list)  # for each token, the time from the site's write to its arrival
    failures: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.whole_ms) / self.seconds


def request(url: str, key: str, prompt_bytes: int, tokens: int, path: str = "/v1/chat/completions") -> bytes:
    """Return a chat completion as a client would send it, streamed if `tokens` > 0.

    The prompt is text of many short sentences.
    """
    sentence = "The lamp on the quay burns all night, and no one has ever seen who lights it. "
    text = (sentence * (prompt_bytes // len(sentence) + 1))[:prompt_bytes]
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens or 16,
        "stream": tokens > 0,
    }
    body = orjson.dumps(fields)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nuser-agent: load-test\r\naccept: */*\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(url: str, raw: bytes, connections: int, seconds: float) -> Heard:
    """Keep warm connections busy; wait for and count requests that are open when the time is up."""
    heard = Heard()
    began = time.perf_counter()
    await asyncio.gather(*(_ask_again(url, raw, heard, began + seconds, i / connections) for i in range(connections)))
    heard.seconds = time.perf_counter() - began
    return heard


@asynccontextmanager
async def idle_streams(url: str, raw: bytes, count: int) -> AsyncIterator[int]:
    """Open streams that stay silent; yield how many started."""
    gate = asyncio.Semaphore(200)
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)

    async def begin() -> Answer:
        async with gate, asyncio.timeout(60):
            _, answer = await loop.create_connection(Answer, parts.hostname or "", parts.port or 80)
            waiting = asyncio.ensure_future(answer.to(raw))
            while not answer.first_at and not waiting.done():
                await asyncio.sleep(0.05)
            waiting.cancel()
            return answer

    answers = await asyncio.gather(*(begin() for _ in range(count)), return_exceptions=True)
    started = [answer for answer in answers if isinstance(answer, Answer)]
    try:
        yield sum(answer.first_at > 0 for answer in started)
    finally:
        for answer in started:
            answer.close()


async def _ask_again(url: str, raw: bytes, heard: Heard, until: float, phase: float) -> None:
    if b'"stream":true' in raw:
        await asyncio.sleep(0.25 * phase)  # otherwise all streams would send at the same time
    parts = urlsplit(url)
    answer: Answer | None = None
    while time.perf_counter() < until:
        if answer is None or answer.is_closed:
            _, answer = await asyncio.get_running_loop().create_connection(
                Answer, parts.hostname or "", parts.port or 80
            )
        sent = time.monotonic_ns()
        try:
            async with asyncio.timeout(60):
                status = await answer.to(raw)
        except (OSError, TimeoutError, httptools.HttpParserError):
            heard.failures += 1
            answer.close()
            continue
        if status != 200:
            heard.failures += 1
            await asyncio.sleep(0.01)
            continue
        heard.whole_ms.append((time.monotonic_ns() - sent) / 1e6)
        if answer.delays_ns:
            heard.first_ms.append((answer.first_at - sent) / 1e6)
            heard.token_ms += [delay / 1e6 for delay in answer.delays_ns]
    if answer is not None:
        answer.close()


class Answer(asyncio.Protocol):
    """A connection, and the answer to the last request on it."""

    def __init__(self) -> None:
        self.is_closed = False
        self.delays_ns: list[int] = []
        self.first_at = 0
        self._done: asyncio.Future[int] | None = None
        self._tail = b""

    async def to(self, raw: bytes) -> int:
        """Send a request; return the status once the answer is complete."""
        self.delays_ns, self.first_at, self._tail = [], 0, b""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return await self._done

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's classes are not subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(error if isinstance(error, OSError) else ConnectionResetError("closed"))

    def on_body(self, body: bytes) -> None:
        now = time.monotonic_ns()
        text = self._tail + body
        end = 0
        for found in _MOMENT.finditer(text):
            self.first_at = self.first_at or now
            self.delays_ns.append(now - int(found[1]))
            end = found.end()
        self._tail = text[max(end, len(text) - 64) :]

    def on_message_complete(self) -> None:
        assert self._done is not None
        if not self._parser.should_keep_alive():
            self.is_closed = True
            self._transport.close()
        if not self._done.done():
            self._done.set_result(self._parser.get_status_code())
