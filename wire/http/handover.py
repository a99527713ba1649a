"""Connections that our own HTTP/1.1 server gives away, with what has been read of them: Hypercorn serves them to the same application.

Hypercorn and what is under it take 50 ms to import, so the first such connection does that, in a thread: nobody else's bytes wait for it. Most
processes never do. Knows no protocol.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from wire.errors import Dialect
from wire.http.exchange import Application
from wire.http.listen import KEEP_ALIVE_S
from wire.http.origins import Origins, answer_preflight

if TYPE_CHECKING:
    from wire.http.hypercorn_connection import Hypercorn

MAX_MESSAGE_BYTES = 16 << 20  # of a WebSocket's message


class Handover:
    """What a server calls with each of them."""

    def __init__(
        self,
        app: Application,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        origins: Origins | None = None,
    ) -> None:
        self._app = app if origins is None else _judged(app, origins)
        self._keep_alive_s = keep_alive_s
        self._max_message_bytes = max_message_bytes
        self._hypercorn: Hypercorn | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._hypercorn is None:
            await asyncio.to_thread(_import)
        if self._hypercorn is None:  # another connection may have been quicker
            from wire.http.hypercorn_connection import Hypercorn

            self._hypercorn = Hypercorn(self._app, self._keep_alive_s, self._max_message_bytes)
        await self._hypercorn.serve(reader, writer)

    async def stop(self) -> None:
        """Idle connections end; those at work are told to take no more."""
        if self._hypercorn is not None:
            await self._hypercorn.stop()


def _judged(app: Application, origins: Origins) -> Application:
    """What our own server does with each head."""

    async def judged(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await app(scope, receive, send)
            return
        method = scope.get("method", "GET")
        if (refusal := origins.refusal(method, scope["headers"])) is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            body = orjson.dumps(refusal.body(Dialect.OPENAI))
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": refusal.status(Dialect.OPENAI), "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        said, is_preflight = origins.cors(method, scope["path"], scope["headers"])

        async def saying(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *said]}
            await send(message)

        await (answer_preflight if is_preflight else app)(scope, receive, saying)

    return judged


def _import() -> None:
    import wire.http.hypercorn_connection  # noqa: F401
