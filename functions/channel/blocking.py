"""A channel's socket I/O in code that cannot await, while the event loop is blocked.

Frames that arrive meanwhile, including pings, are handled at once; callbacks that they schedule run later, in the loop.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Protocol

from pilotlight.functions.channel.failure import ChannelClosed
from pilotlight.functions.channel.streams import WINDOW_BYTES


class ReceivingChannel(Protocol):
    why_closed: str

    def data_received(self, data: bytes, /) -> None: ...


class BlockingExchange:
    def __init__(self, sock: socket.socket, transport: asyncio.Transport, channel: ReceivingChannel) -> None:
        self._socket = sock
        self._transport = transport
        self._channel = channel

    def exchange_until(self, is_done: Callable[[], bool]) -> None:
        """Send and receive until `is_done`; bytes that are still in asyncio's transport are sent first.
        Raises ChannelClosed."""
        transport, poll = self._transport, select.poll()
        while not is_done():
            if transport.is_closing():
                raise ChannelClosed(self._channel.why_closed or "the connection to the other process is closed")
            is_waiting = transport.get_write_buffer_size() > 0
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if is_waiting else 0))
            events = poll.poll()[0][1]
            if events & select.POLLOUT and is_waiting:
                transport._write_ready()  # type: ignore[attr-defined]  # selector transports have it in 3.11 to 3.14
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(WINDOW_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"the connection to the other process broke: {error}") from None
        if not data:
            raise ChannelClosed("the other process closed the connection")
        self._channel.data_received(data)
