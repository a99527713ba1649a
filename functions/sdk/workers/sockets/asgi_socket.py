"""A WebSocket of an ASGI application in a function.

The scope is `websocket`, with the extension `websocket.http.response`. The application holds one end of a WebSocketPair; the response that accepts
the socket carries the other.
"""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from pilotlight.functions.channel.socket_messages import SocketClose
from workers.entrypoint import Context
from workers.http.response import Response
from workers.sockets.websockets import WebSocketPair
from workers.trouble import log_trouble

Message = MutableMapping[str, Any]
_running: set["asyncio.Task[None]"] = set()


class Socket:
    def __init__(self, scope: MutableMapping[str, Any], context: Context) -> None:
        self._context = context
        self._client, self._server = WebSocketPair()
        self._head: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._has_connected = self._is_accepted = False
        self._refusal: tuple[int, list[tuple[str, str]]] | None = None
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._is_run_on = False
        protocols = [value.decode("latin-1") for name, value in scope["headers"] if name == b"sec-websocket-protocol"]
        self.scope = {
            **{key: value for key, value in scope.items() if key != "method"},
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "scheme": "wss" if scope["scheme"] == "https" else "ws",
            "subprotocols": [each.strip() for value in protocols for each in value.split(",") if each.strip()],
            "extensions": {"websocket.http.response": {}},
        }

    async def response(self, app: Callable[..., Any]) -> Response:
        """Return the application's response once it has accepted or refused; the application then continues.
        Raises an exception of the application before that point."""
        self._task = asyncio.ensure_future(self._run(app))
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)
        try:
            return await self._head
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def _run(self, app: Callable[..., Any]) -> None:
        try:
            await app(self.scope, self._receive, self._send)
        except Exception as error:
            if not self._head.done():
                self._head.set_exception(error)
            else:
                log_trouble("Exception in ASGI application after response started", error)
                self._server.close(1011)
            return
        if not self._head.done():
            self._head.set_exception(RuntimeError("the application returned without accepting the WebSocket"))
        self._server.close(1000)

    async def _receive(self) -> Message:
        if not self._has_connected:
            self._has_connected = True
            return {"type": "websocket.connect"}
        message = await self._server.receive()
        if isinstance(message, SocketClose):
            self._run_on()
            return {"type": "websocket.disconnect", "code": message.code, "reason": message.reason}
        text, data = (message, None) if isinstance(message, str) else (None, bytes(message))
        return {"type": "websocket.receive", "text": text, "bytes": data}

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept" and not self._head.done():
            self._accept(message)
        elif kind == "websocket.close" and not self._head.done():
            self._head.set_result(Response(None, 403))
            self._run_on()
        elif kind == "websocket.http.response.start" and not self._head.done():
            self._refusal = int(message["status"]), _text(message.get("headers", ()))
        elif kind == "websocket.http.response.body" and self._refusal is not None:
            self._body.append(bytes(message.get("body", b"")))
            if not message.get("more_body", False) and not self._head.done():
                status, headers = self._refusal
                self._head.set_result(Response(b"".join(self._body), status, headers=headers))
                self._run_on()
        elif kind == "websocket.send" and self._is_accepted:
            if self._server.close_code is not None:
                raise OSError("the client has left")  # required by the specification since 2.4
            data = message.get("bytes")
            await self._server.send(data if data is not None else message["text"])
        elif kind == "websocket.close":
            self._server.close(message.get("code") or 1000, message.get("reason"))
            self._run_on()
        else:
            raise RuntimeError(f"the application sent {kind!r}, which is not allowed in this state of the WebSocket")

    def _run_on(self) -> None:
        """Let the application finish after its socket has closed, as background work of the request."""
        if self._task is not None and not self._is_run_on:
            self._is_run_on = True
            self._context.wait_until(self._task)

    def _accept(self, message: Message) -> None:
        headers = _text(message.get("headers", ()))
        if message.get("subprotocol"):
            headers.append(("sec-websocket-protocol", message["subprotocol"]))
        self._is_accepted = True
        self._server.accept()
        self._head.set_result(Response(None, 101, headers=headers, web_socket=self._client))


def _text(headers: Any) -> list[tuple[str, str]]:
    return [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in headers]
