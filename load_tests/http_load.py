"""Closed and open loops of small HTTP/1.1 requests over kept connections.

Measures a server's throughput and its answer times. There is one protocol object per connection, and no more parsing than necessary, so that one
process can keep several servers busy.
"""

import asyncio
import time
from typing import NamedTuple


class Load(NamedTuple):
    requests_per_s: float
    latencies_ms: list[float]
    failed: int  # requests without an answer, or with another status than 200


class Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._buffer = b""
        self._answer: asyncio.Future[bool] | None = None
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._settle(False)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        _, _, length = lower.partition(b"content-length: ")
        whole = len(body) >= int(length.split(b"\r\n")[0]) if length else body.endswith(b"0\r\n\r\n")
        if whole:
            self._buffer = b""
            self._settle(head.split(b" ", 2)[1] == b"200")

    async def ask(self) -> bool:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(self._request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _settle(self, is_good: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(is_good)


def request_of(path: str, method: str = "GET", body: bytes = b"") -> bytes:
    more = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n".encode() + body


async def closed_loop(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Send the next request on each connection as soon as the last one is answered."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    failed = 0
    ends_at = time.perf_counter() + seconds

    async def keep_asking() -> None:
        nonlocal failed
        _, connection = await loop.create_connection(lambda: Connection(request), "127.0.0.1", port)
        while (began := time.perf_counter()) < ends_at and not connection.is_lost:
            is_good = await connection.ask()
            times.append(1e3 * (time.perf_counter() - began))
            failed += not is_good
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(keep_asking() for _ in range(connections)))
    return Load(len(times) / (time.perf_counter() - began), times, failed)


async def open_loop(port: int, request: bytes, per_s: float, seconds: float, timeout_s: float = 10.0) -> Load:
    """Send requests at even distances, without waiting for earlier ones.

    Each uses an idle connection from a pool that grows.
    """
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    times: list[float] = []
    failed = 0

    async def ask() -> None:
        nonlocal failed
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                if not idle:
                    _, made = await loop.create_connection(lambda: Connection(request), "127.0.0.1", port)
                    idle.append(made)
                connection = idle.pop()
                is_good = await connection.ask()
        except (TimeoutError, OSError):
            failed += 1
            return
        times.append(1e3 * (time.perf_counter() - began))
        failed += not is_good
        if not connection.is_lost:
            idle.append(connection)

    began = loop.time()
    tasks = []
    for index in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, began + index / per_s - loop.time()))
        tasks.append(asyncio.ensure_future(ask()))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return Load(len(times) / (loop.time() - began), times, failed)
