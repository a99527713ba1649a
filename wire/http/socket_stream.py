"""WebSockets of Hypercorn's connections: RFC 6455 as far as an application can rely on it. `install` puts this in the place of Hypercorn's own.

Hypercorn's hides the client's close code from the application, closes without one on a broken frame (RFC 6455 wants 1002, 1007, 1009), never looks
whether a silent client is still there, forgets an application whose client speaks too early, and blocks for ever on a full queue whose application
has ended. Compression is not offered: a frame of 64 KiB can hold 64 MiB. Over HTTP/2 (RFC 8441) WebSockets are refused: one that is not read would
hold up its connection's other streams.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import h2.settings
import hypercorn.protocol
import hypercorn.protocol.h2
import hypercorn.protocol.h11
from hypercorn.protocol.events import Body, Data, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, WSStream
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping
from wsproto.frame_protocol import CloseReason

PING_S = 20.0  # below the minute of silence after which proxies, ours too, take a connection for dead
LOST_S = 50.0  # without a byte from the client, although it was pinged
LAST_WORDS_S = 1.0  # for a close frame to leave


class SocketStream(WSStream):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._heard_at = time.monotonic()
        self._is_held = False  # nothing is read, since the application takes nothing
        self._is_told = False  # the application has its websocket.disconnect
        self._ended = asyncio.Event()

    async def handle(self, event: Event) -> None:
        if self.closed:
            return
        if isinstance(event, Request):
            refused = {b"sec-websocket-extensions"}
            await super().handle(replace(event, headers=[pair for pair in event.headers if pair[0] not in refused]))
        elif isinstance(event, StreamClosed):
            self._end()
        elif isinstance(event, (Body, Data)) and self.handshake.accepted:
            self._heard_at = time.monotonic()
            self.connection.receive_data(event.data)
            await self._handle_events()
        elif isinstance(
            event, (Body, Data)
        ):  # before the handshake's answer: Hypercorn refuses it too, and never tells the application
            await self._send_error_response(400)
            self._end()
            await self.send(StreamClosed(stream_id=self.stream_id))
        else:
            await super().handle(event)

    async def app_send(self, message: Any) -> None:
        if message is None and self.app_put is not None:
            await self._application_ended()
        else:
            await super().app_send(message)

    async def _application_ended(self) -> None:
        self._is_told = True
        self._queue_emptied()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await super().app_send(None)
                return
        if (transport := self._transport()) is not None:  # the client takes nothing
            transport.abort()

    async def _accept(self, message: Any) -> None:
        await super()._accept(message)
        self._heard_at = time.monotonic()
        self.task_group.spawn(self._keep_alive)

    async def _handle_events(self) -> None:
        for event in self.connection.events():
            if self.closed:
                return
            if isinstance(event, Message):
                try:
                    self.buffer.extend(event)
                except FrameTooLargeError:
                    return await self._refuse(CloseReason.MESSAGE_TOO_BIG, "the message is too large")
                if event.message_finished:
                    await self._hand_on(self.buffer.to_message())
                    self.buffer.clear()
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                return await self._closed_by_client(event)

    async def _hand_on(self, message: Any) -> None:
        assert self.app_put is not None
        self._is_held = True
        try:
            await self.app_put(message)
        finally:
            self._is_held = False
            self._heard_at = time.monotonic()

    async def _closed_by_client(self, event: CloseConnection) -> None:
        if self.connection.state is ConnectionState.OPEN:  # no close frame came: what came is none at all
            return await self._refuse(event.code, event.reason or "")
        if self.connection.state is ConnectionState.REMOTE_CLOSING:
            await self._send_wsproto_event(event.response())
        await self._disconnected(event.code, event.reason or "")

    async def _refuse(self, code: int, reason: str) -> None:
        """Ends the connection for what the client has sent."""
        self.state = ASGIWebsocketState.CLOSED
        await self._send_wsproto_event(CloseConnection(code=int(code), reason=reason))
        await self._disconnected(int(code), reason)

    async def _disconnected(self, code: int, reason: str) -> None:
        """Behind all messages that came before."""
        self._is_told = True
        await self._hand_on({"type": "websocket.disconnect", "code": int(code), "reason": reason})
        await self.send(StreamClosed(stream_id=self.stream_id))

    async def _keep_alive(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), PING_S)
                return
            if time.monotonic() - self._heard_at > LOST_S and not self._is_held:
                return await self.send(StreamClosed(stream_id=self.stream_id))
            await self._send_wsproto_event(Ping())

    def _end(self) -> None:
        self.closed = True
        self._ended.set()
        if self.app_put is None or self._is_told:
            return
        waiting = self._queue_emptied()
        for message in waiting[: self._queue.maxsize - 1]:  # there is room for the news itself, whatever waits
            self._queue.put_nowait(message)
        code = CloseReason.ABNORMAL_CLOSURE.value
        self._queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})

    @property
    def _queue(self) -> "asyncio.Queue[Any]":
        queue = getattr(self.app_put, "__self__", None)
        assert isinstance(queue, asyncio.Queue), "Hypercorn hands messages to its application otherwise than it did"
        return queue

    def _queue_emptied(self) -> list[Any]:
        """What waited in it. Whoever waits for room goes on."""
        waiting = []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        return waiting

    def _transport(self) -> asyncio.Transport | None:
        protocol = getattr(self.send, "__self__", None)
        server = getattr(getattr(protocol, "send", None), "__self__", None)
        return getattr(getattr(server, "writer", None), "transport", None)


class _H2Protocol(hypercorn.protocol.h2.H2Protocol):
    """Does not offer what is refused."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        offered = self.connection.local_settings
        told = {code: offered[code] for code in h2.settings.SettingCodes if code in offered}
        told.pop(h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL, None)
        self.connection.local_settings = h2.settings.Settings(client=False, initial_values=told)


class _Refused(WSStream):
    """501, without a body: one would wait for the client's window, and hold up the connection's other streams."""

    async def handle(self, event: Event) -> None:
        if self.closed or not isinstance(event, Request):
            return
        self.closed = True
        headers = [(b"content-length", b"0")]
        await self.send(Response(stream_id=self.stream_id, status_code=501, headers=headers))
        await self.send(EndBody(stream_id=self.stream_id))
        await self.send(StreamClosed(stream_id=self.stream_id))


def install() -> None:
    """For all connections of this process."""
    for module, name, stream in (
        (hypercorn.protocol.h11, "WSStream", SocketStream),
        (hypercorn.protocol.h2, "WSStream", _Refused),
        (hypercorn.protocol, "H2Protocol", _H2Protocol),
    ):
        assert hasattr(module, name), f"Hypercorn has no {module.__name__}.{name} any more"
        setattr(module, name, stream)
