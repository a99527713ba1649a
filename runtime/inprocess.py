"""One exchange with an ASGI application of this process: the same door as over HTTP, without a socket.

The response's body is an asynchronous iterator with room for a few chunks. Closing it, at any time, is the client leaving: the application's task is
cancelled, and has ended when `aclose` returns.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import quote

from starlette.types import ASGIApp, Message

from runtime.middleware.identity import GENUINE_HOP
from wire.chance import random_bytes

CHUNKS_WAITING = 16


class Exchange:
    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes = b"",
        query: str = "",
    ) -> None:
        """`path` is the decoded one."""
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self._body: bytes | None = body
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(CHUNKS_WAITING)
        self._started = asyncio.Event()
        self._left = asyncio.Event()
        pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        pairs += [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        scope: dict[str, object] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": quote(path, errors="replace").encode(), "query_string": query.encode("latin-1", "replace"), "root_path": "",
            "headers": pairs, "client": None, "server": None, "state": {}, "extensions": {}, "path_params": {},
            GENUINE_HOP: False, "pilotlight.request_id": random_bytes(16).hex(),
        }  # fmt: skip
        self._task = asyncio.ensure_future(self._run(app, scope))

    async def start(self) -> "Exchange":
        """Returns when status and headers are here. Raises what the application raised before."""
        started = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.aclose()
            raise
        finally:
            started.cancel()
        if not self._started.is_set():
            self._task.result()
            raise RuntimeError("the application ended without an answer")
        return self

    def __aiter__(self) -> "Exchange":
        return self

    async def __anext__(self) -> bytes:
        if self._left.is_set():
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        if chunk is None:
            self._left.set()
            self._task.result()  # a stream that broke in the middle is no whole one
            raise StopAsyncIteration
        return chunk

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self])

    async def aclose(self) -> None:
        self._left.set()
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _run(self, app: ASGIApp, scope: dict[str, object]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            while not self._left.is_set():
                with suppress(asyncio.QueueFull):
                    self._chunks.put_nowait(None)
                    break
                await asyncio.sleep(0.01)  # the reader is slow; the end waits behind what it has not read

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
            self._started.set()
        elif chunk := message.get("body", b""):
            await self._chunks.put(chunk)
