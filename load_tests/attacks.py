"""Attacks on a network's HTTP servers, and their effect on other clients.

Each attack is compared with well-formed requests of equal number and size. `CASES` are complete requests whose statuses are known. `Neighbour` is
another client, which requests /livez.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson
import psutil

CHAT = "/v1/chat/completions"
MIB = 1 << 20
PAGE = {"origin": "http://evil.example", "content-type": "text/plain"}
H2C = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
CHUNKED = {"transfer-encoding": "chunked", "content-length": "", "connection": "keep-alive"}
NO_HEAD = {"host": "", "content-type": "", "content-length": ""}
OPEN = frozenset({200})  # statuses for any credentials: the attacked router has no keys, and ignores them
MISDIRECTED = frozenset({403, 421})
REFUSED = frozenset({400, 403, 404, 405, 408, 411, 413, 415, 421, 422, 426, 429, 431, 501, 503, 505})
ENDED = REFUSED | {0}


@dataclass(frozen=True)
class Attack:
    """A request that is sent again and again.

    `build` returns its body; `answers` are the statuses it may get, where 0 is a closed connection.
    """

    name: str
    build: Callable[[], bytes] = bytes
    path: str = CHAT
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    answers: frozenset[int] = REFUSED
    version: str = "HTTP/1.1"

    def request(self, host: str) -> bytes:
        body = self.build()
        fields = {"host": host, "content-type": "application/json", "content-length": str(len(body)), **self.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        return f"{self.method} {self.path} {self.version}\r\n{head}\r\n".encode() + body


def _chat(**fields: object) -> bytes:
    return orjson.dumps({"model": "ember", "max_tokens": 1, **fields})


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _zeros() -> bytes:
    return b'{"model":"ember","messages":[' + b",".join([b"0"] * (4 * MIB - 64)) + b"]}"


def _many_messages() -> bytes:
    return _chat(messages=[{"role": "user", "content": "x"}] * 100_000)


def _many_calls() -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return _chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call] * 80_000}, *_said("hi")])


def _special_tokens() -> bytes:
    return _chat(messages=_said("<|im_start|>" * 600_000))


def _deep(levels: int) -> bytes:
    schema = b'{"type":"object"}'
    for _ in range(levels):
        schema = b'{"type":"object","properties":{"a":' + schema + b"}}"
    tool = b'{"type":"function","function":{"name":"f","parameters":' + schema + b"}}"
    return b'{"model":"ember","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"tools":[' + tool + b"]}"


def _nested() -> bytes:
    return b'{"model":"ember","messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}"


def _hello() -> bytes:
    return _chat(messages=_said("hi"))


CASES: tuple[Attack, ...] = (
    Attack("messages that are 4 million zeros", _zeros),
    Attack("the same to /debug/route", _zeros, "/debug/route"),
    Attack("the same to /v1/models", _zeros, "/v1/models"),
    Attack("100,000 short messages", _many_messages),
    Attack("80,000 tool calls in one message", _many_calls),
    Attack("600,000 special tokens", _special_tokens),
    Attack("a tool's schema of 200 levels", lambda: _deep(200)),
    Attack("a tool's schema of 900 levels", lambda: _deep(900)),
    Attack("500,000 brackets", _nested),
    Attack("a body of another type", _hello, headers={"content-type": "image/png"}, answers=REFUSED | {200}),
    Attack("credentials that are none", _hello, headers={"authorization": "Basic Zm9vOmJhcg=="}, answers=OPEN),
    Attack("another site's host name", _hello, headers={"host": "evil.example:8787"}, answers=MISDIRECTED),
    Attack("a page of another origin", _hello, headers=PAGE, answers=MISDIRECTED),
    Attack("an upgrade to h2c", _hello, headers=H2C, answers=REFUSED | {200}),  # an upgrade may be ignored
    Attack("HTTP/1.0 with chunks", lambda: b"0\r\n\r\n", headers=CHUNKED, version="HTTP/1.0", answers=ENDED),
    Attack("HTTP/2.0 in a request line", _hello, version="HTTP/2.0", answers=ENDED),
    Attack("no version in a request line", _hello, version="", answers=ENDED),
    Attack("HTTP/2 with prior knowledge", lambda: b"SM\r\n\r\n", "*", "PRI", NO_HEAD, ENDED, "HTTP/2.0"),
)


def well_formed(size: int) -> bytes:
    """Build a chat request with a body of about `size` bytes."""
    return _chat(messages=_said("a word " * max(1, (size - 90) // 7)))


async def send(url: str, request: bytes, count: int, seconds: float, clients: int = 2) -> "tuple[int, Counter[int]]":
    """Send at most `count` requests in `seconds`, each on a new connection.

    `clients` send at the same time, each one request after another.
    """
    answers: Counter[int] = Counter()
    until, left = time.monotonic() + seconds, [count]
    pace_s = seconds / count if count < 10**6 else 0.0

    async def client() -> None:
        while left[0] > 0 and time.monotonic() < until:
            left[0] -= 1
            began = time.monotonic()
            answers[await ask(url, request)] += 1
            await asyncio.sleep(max(0.0, clients * pace_s - (time.monotonic() - began)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return sum(answers.values()), answers


async def ask(url: str, request: bytes, timeout_s: float = 60.0) -> int:
    """Return the answer's status; 0 if the connection closed without one, -1 after the timeout."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(request)
                line = await reader.readline()
                words = line.split()
                return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/1") else 0
            finally:
                writer.transport.abort()  # megabytes may be unsent, and the server will not read them
    except TimeoutError:
        return -1
    except OSError:
        return 0


class Neighbour:
    """Another client: it requests /livez every 10 ms, and counts latency from the scheduled time."""

    def __init__(self, url: str, pids: tuple[int, ...] = ()) -> None:
        self._url = url
        self._processes = [psutil.Process(pid) for pid in pids]
        self.waits_ms: list[float] = []
        self.most_rss_mib = 0.0

    async def __aenter__(self) -> "Neighbour":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        request = f"GET /livez HTTP/1.1\r\nhost: {urlsplit(self._url).netloc}\r\nconnection: close\r\n\r\n".encode()
        due = time.perf_counter()
        while True:
            status = await ask(self._url, request)
            if status != 200:
                raise RuntimeError(f"/livez was answered with {status}")
            now = time.perf_counter()
            self.waits_ms.append(1e3 * (now - due))
            self.most_rss_mib = max(
                [self.most_rss_mib, *(process.memory_info().rss / MIB for process in self._processes)]
            )
            due = max(due + 0.01, now)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
