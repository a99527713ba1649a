"""Connects an end of a WebSocketPair to an exchange of the channel, and relays messages.

`bridged` is for the end that a response carries, `Joint` for the socket of an outgoing fetch.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import ABNORMAL, MessageDecoder, MessageError, SocketClose, encode
from workers.sockets.websockets import MAX_WAITING_BYTES, WebSocket, WebSocketPair

CLOSE_REPLY_S = 10.0  # time for the other side to answer a close


def bridged(end: WebSocket, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Connect an end to the request's stream `incoming`; return the stream for the response."""
    _take(end)
    return Outgoing(end, incoming)


class Joint:
    """The socket of an outgoing request.

    Send the request with `body`. If the handshake succeeds, call `opened` with the answer's stream; it returns the function's socket. Otherwise call
    `refused`.
    """

    def __init__(self) -> None:
        self.socket, end = WebSocketPair()
        _take(end)
        self._end = end
        self._answer: asyncio.Future[AsyncIterator[bytes]] = asyncio.get_running_loop().create_future()
        self.body = Outgoing(end, self._incoming())

    def opened(self, stream: AsyncIterator[bytes]) -> WebSocket:
        self._answer.set_result(stream)
        return self.socket

    def refused(self) -> None:
        self._answer.cancel()
        self._end._inbox.put(SocketClose(ABNORMAL))

    async def _incoming(self) -> AsyncIterator[bytes]:
        stream = await self._answer
        try:
            async for chunk in stream:
                yield chunk
        finally:
            aclose: Any = getattr(stream, "aclose", None)
            if aclose is not None:
                await aclose()


def asks_for_socket(headers: Any) -> bool:
    return (headers.get("upgrade") or "").lower() == "websocket"


def _take(end: WebSocket) -> None:
    if end._is_accepted or end._is_joined or end._hibernation is not None:
        raise TypeError("the response carries an end of the WebSocket that is in use here; give it the other end")
    end._is_joined = True


class Outgoing:
    """An async iterator over an end's messages, encoded for an exchange.

    While it runs, the exchange's stream is relayed to the end. `aclose` closes the end even if iteration never started.
    """

    def __init__(self, end: WebSocket, incoming: AsyncIterator[bytes]) -> None:
        self._end = end
        self._messages = _joined(end, incoming)

    def __aiter__(self) -> "Outgoing":
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._messages)

    async def aclose(self) -> None:
        await self._messages.aclose()
        if not self._end._has_closed:
            self._end._close(SocketClose(ABNORMAL))


async def _joined(end: WebSocket, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    taking = asyncio.ensure_future(_taken_in(end, incoming))
    try:
        while True:
            message = await end._inbox.take()
            yield encode(message)
            if isinstance(message, SocketClose):
                break
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_REPLY_S):
                await asyncio.shield(taking)
    finally:
        taking.cancel()
        if not end._has_closed:
            end._close(SocketClose(ABNORMAL))


async def _taken_in(end: WebSocket, incoming: AsyncIterator[bytes]) -> None:
    decoder = MessageDecoder(MAX_WAITING_BYTES)
    close = SocketClose(ABNORMAL)
    try:
        async for chunk in incoming:
            for message in decoder.feed(chunk):
                if isinstance(message, SocketClose):
                    close = message
                    return
                end._peer._put(message)
                await end._peer._inbox.room()
    except (Failure, MessageError):
        return
    finally:
        if not end._has_closed:
            end._close(close)
