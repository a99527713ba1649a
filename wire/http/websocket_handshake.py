"""The server's half of a WebSocket handshake, as ASGI's `websocket`.

The client gets a WebSocket or a plain response.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
from wsproto.utilities import generate_accept_token

from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.http.websocket import ABNORMAL, FAILED, NORMAL, WebSocket, WebSocketClose

VERSION = b"13"
DENIAL = "websocket.http.response"  # ASGI's extension: a plain response instead of a WebSocket

NO_HANDSHAKE = ApiError(
    "invalid_request", "a WebSocket's handshake has one sec-websocket-key and sec-websocket-version: 13"
)

Headers = list[tuple[bytes, bytes]]
Open = Callable[[Headers], WebSocket]

log = logging.getLogger(__name__)


class PendingUpgrade:
    """An ASGI application for the HTTP request of a WebSocket; `app` gets it as a `websocket`."""

    def __init__(self, app: Application, open_socket: Open) -> None:
        """`open_socket` answers with 101 and the given headers, and takes the connection over."""
        self._app = app
        self._open = open_socket
        self._is_told = False  # the application has received `websocket.connect`
        self._key = b""

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        self._receive, self._send = receive, send
        self._socket: WebSocket | None = None
        headers: Headers = scope["headers"]
        keys = [value for name, value in headers if name == b"sec-websocket-key"]
        versions = [value for name, value in headers if name == b"sec-websocket-version"]
        if len(keys) != 1 or versions != [VERSION]:
            return await self._refuse(426 if versions and versions != [VERSION] else 400, NO_HANDSHAKE)
        self._key = keys[0]
        try:
            await self._app(_websocket_scope(scope), self.receive, self.send)
        except (Exception, asyncio.CancelledError) as error:
            if self._socket is None:
                raise
            self._socket.close(FAILED)
            if isinstance(error, asyncio.CancelledError):
                raise
            log.exception("the application failed")
        else:
            if self._socket is not None:
                self._socket.close(FAILED)  # no effect if it is closed already

    async def receive(self) -> dict[str, Any]:
        if not self._is_told:
            self._is_told = True
            return {"type": "websocket.connect"}
        while self._socket is None:
            if (await self._receive())["type"] == "http.disconnect" and self._socket is None:
                return {"type": "websocket.disconnect", "code": ABNORMAL, "reason": ""}
        message = await self._socket.receive()
        if isinstance(message, WebSocketClose):
            return {"type": "websocket.disconnect", "code": message.code, "reason": message.reason}
        is_text = isinstance(message, str)
        return {
            "type": "websocket.receive",
            "text": message if is_text else None,
            "bytes": None if is_text else message,
        }

    async def send(self, message: MutableMapping[str, Any]) -> None:
        kind: str = message["type"]
        if self._socket is not None:
            if kind == "websocket.send":
                text = message.get("text")
                await self._socket.send(message["bytes"] if text is None else text)
            elif kind == "websocket.close":
                self._socket.close(message.get("code") or NORMAL, message.get("reason") or "")
            else:
                raise ValueError(f"{kind} behind websocket.accept")
        elif kind == "websocket.accept":
            self._socket = self._open(self._answer_headers(message))
        elif kind == "websocket.close":
            await self._refuse(403)
        elif kind.startswith(DENIAL):
            await self._send({**message, "type": kind.removeprefix("websocket.")})
        else:
            raise ValueError(f"{kind} before websocket.accept")

    def _answer_headers(self, message: MutableMapping[str, Any]) -> Headers:
        headers = [(b"upgrade", b"websocket"), (b"sec-websocket-accept", generate_accept_token(self._key))]
        if (subprotocol := message.get("subprotocol")) is not None:
            headers.append((b"sec-websocket-protocol", subprotocol.encode("ascii")))
        return [*headers, *message.get("headers", ())]

    async def _refuse(self, status: int, error: ApiError | None = None) -> None:
        body = b"" if error is None else orjson.dumps(error.body(Dialect.OPENAI))
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        if status == 426:
            headers.append((b"sec-websocket-version", VERSION))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _websocket_scope(scope: Any) -> dict[str, Any]:
    offered = [
        token.strip().decode("latin-1")
        for name, value in scope["headers"]
        if name == b"sec-websocket-protocol"
        for token in value.split(b",")
    ]
    return {key: value for key, value in scope.items() if key != "method"} | {
        "type": "websocket",
        "scheme": "wss" if scope["scheme"] == "https" else "ws",
        "subprotocols": offered,
        "extensions": {DENIAL: {}},
    }
