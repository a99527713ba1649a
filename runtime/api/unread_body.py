"""Middleware that discards the unread rest of request bodies, so that clients can read refusals.

Closing a socket with unread bytes resets the connection, which can destroy the response on its way. Over HTTP/2, Hypercorn's queue of ten body
messages blocks forever if nothing takes them. Pilotlight's own server does this itself.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.support import background

DISCARD_BYTES = 64 << 20
DISCARD_S = 10.0


class UnreadBodyMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _RequestBody(scope, receive)

        async def finishing(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or body.is_read or not body.may_come:
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(body.discard(DISCARD_BYTES), DISCARD_S)
            rest = asyncio.ensure_future(body.discard(None))
            try:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await background.stop(rest)

        await self._app(scope, body.receive, finishing)


class _RequestBody:
    """A request's body, and whether it has been read to its end."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.is_read = False
        self._scope = scope
        self._receive = receive
        self._is_asked_for = False

    @property
    def may_come(self) -> bool:
        """Tell whether the client may send a body: not if it still waits for 100 Continue."""
        headers = dict(self._scope["headers"])
        if not self._is_asked_for and headers.get(b"expect", b"").lower() == b"100-continue":
            return False
        has_length = headers.get(b"content-length", b"0") != b"0"
        return has_length or b"transfer-encoding" in headers or self._scope["http_version"] == "2"

    async def receive(self) -> Message:
        self._is_asked_for = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.is_read = True
        return message

    async def discard(self, limit: int | None) -> None:
        discarded = 0
        while not self.is_read and (limit is None or discarded < limit):
            discarded += len((await self.receive()).get("body", b""))
