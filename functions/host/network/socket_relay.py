"""Relays one client's WebSocket to an exchange with a function, in both directions.

One side is ASGI's `websocket`, the other the channel's messages. At most one message is in transit in each direction, so a side that does not read
slows down the other, through the channel's credit and the client's TCP.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Send

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import (
    ABNORMAL,
    NO_STATUS,
    MessageDecoder,
    MessageError,
    SocketClose,
    encode,
)
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.support.time_limits import TimeLimit

GOING_AWAY, TOO_BIG, FAILED, RESTARTING = 1001, 1009, 1011, 1012
SITES_OWN = ("closing",)  # codes of failures that the site causes, not the function

ResultT = TypeVar("ResultT")

log = logging.getLogger("pilotlight.function")


class SocketRelay:
    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: FunctionLimits,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._clock, self._sleep = clock, sleep
        self._next: asyncio.Future[AsgiMessage] | None = None  # a pending receive whose message is not handled yet
        self._to_function = _HandOff()
        self._is_closed = False  # whether the client has closed, or has been sent a close
        self._active_at = self._clock()

    async def while_present(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run the handshake's work. Raises ClientDisconnect if the client leaves before it ends."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._next = self._next or asyncio.ensure_future(_awaited(self._receive))
                waited: set[asyncio.Future[Any]] = {task, self._next}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and self._next.result()["type"] == "websocket.disconnect":
                    raise ClientDisconnect
            return task.result()
        except BaseException:
            for each in (task, self._next):
                if each is not None:
                    each.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise

    def drop(self) -> None:
        """Stop reading, because the client got another response than a WebSocket."""
        if self._next is not None:
            self._next.cancel()

    def messages(self) -> AsyncIterator[bytes]:
        """Yield the client's messages, encoded for the function."""
        return self._to_function.messages()

    async def run(self, stream: AsyncIterator[bytes], draining: Awaitable[None]) -> None:
        """Relay messages until one side closes, none has come for `socket_idle_s`, or `draining` returns.
        Then close the connection on both sides. `stream` has the function's messages."""
        from_client = asyncio.ensure_future(self._from_client())
        from_function = asyncio.ensure_future(self._from_function(stream))
        idle, drained = asyncio.ensure_future(self._until_idle()), asyncio.ensure_future(draining)
        everything = (from_client, from_function, idle, drained)
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if not from_client.done() and not from_function.done():
                why = SocketClose(RESTARTING, "the site is restarting") if drained.done() else None
                await self._end(why or SocketClose(GOING_AWAY, f"no message for {self._limits.socket_idle_s:g} s"))
            await asyncio.wait({from_client, from_function}, timeout=self._limits.socket_close_s)
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            if (aclose := getattr(stream, "aclose", None)) is not None:
                await aclose()

    async def _from_client(self) -> None:
        while True:
            message = await self._taken()
            if message["type"] == "websocket.disconnect":
                self._is_closed = True
                close = SocketClose(message.get("code") or NO_STATUS, message.get("reason") or "")
                return self._to_function.finish(close)
            text, data = message.get("text"), message.get("bytes")
            sent = encode(text if text is not None else data or b"")
            if len(sent) > self._limits.socket_message_bytes + 5:
                await self._end(SocketClose(TOO_BIG, f"a message may have {self._limits.socket_message_bytes} bytes"))
                continue
            self._active_at = self._clock()
            await self._to_function.put(sent)

    async def _from_function(self, stream: AsyncIterator[bytes]) -> None:
        close = SocketClose(FAILED, "the function ended without closing")
        try:
            decoder = MessageDecoder(self._limits.socket_message_bytes)
            async for chunk in stream:
                for message in decoder.feed(chunk):
                    if isinstance(message, SocketClose):
                        await self._close(message)
                    elif not self._is_closed:
                        await self._tell(message)
        except Failure as failure:
            is_ours = failure.code in SITES_OWN
            close = (
                SocketClose(RESTARTING, "the function is being replaced")
                if is_ours
                else SocketClose(FAILED, "the function failed")
            )
            if not is_ours and not self._is_closed:
                log.warning("a WebSocket ends: %s", failure.detail or failure.message)
        except MessageError as error:
            log.warning("a WebSocket ends, because its function sent %s", error)
            close = SocketClose(FAILED, "the function failed")
        await self._close(close)

    async def _tell(self, message: str | bytes) -> None:
        kind = "text" if isinstance(message, str) else "bytes"
        self._active_at = self._clock()
        async with TimeLimit(self._limits.socket_stall_s):
            await self._send({"type": "websocket.send", kind: message})

    async def _end(self, close: SocketClose) -> None:
        """Close both ends, by the site's decision."""
        self._to_function.finish(close)
        await self._close(close)

    async def _close(self, close: SocketClose) -> None:
        if not self._is_closed:
            self._is_closed = True
            async with TimeLimit(self._limits.socket_stall_s):
                await self._send({"type": "websocket.close", "code": _wire_code(close.code), "reason": close.reason})

    async def _until_idle(self) -> None:
        while (left_s := self._active_at + self._limits.socket_idle_s - self._clock()) > 0:
            await self._sleep(left_s)

    async def _taken(self) -> AsgiMessage:
        if self._next is None:
            return await self._receive()
        message, self._next = await self._next, None
        return message


class _HandOff:
    """A slot for one message to the function; a close follows it, and never waits."""

    def __init__(self) -> None:
        self._message: bytes | None = None
        self._close: SocketClose | None = None
        self._changed = asyncio.Event()
        self._is_free = asyncio.Event()
        self._is_free.set()

    async def put(self, message: bytes) -> None:
        await self._is_free.wait()
        if self._close is None:
            self._is_free.clear()
            self._message = message
            self._changed.set()

    def finish(self, close: SocketClose) -> None:
        self._close = self._close or close
        self._is_free.set()
        self._changed.set()

    async def messages(self) -> AsyncIterator[bytes]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            message, self._message = self._message, None
            if message is not None:
                self._is_free.set()
                yield message
            if self._close is not None and self._message is None:
                yield encode(self._close)
                return


async def _awaited(receive: Receive) -> AsgiMessage:
    return await receive()


def _wire_code(code: int) -> int:
    """Return a close code that may be sent; 1004, 1005, 1006 and 1015 may not."""
    if code == NO_STATUS:
        return 1000
    return code if 3000 <= code <= 4999 or (1000 <= code <= 1014 and code not in (1004, ABNORMAL)) else FAILED
