"""Connections that our HTTP/1.1 server does not serve itself, HTTP/2's and WebSockets': handed on with what has been read of them, and ended with it.

`OtherHandler` gets a reader and a writer, as if nobody had read before (handover.py is one). `SocketHandler` gets a client that waits for an answer
to its upgrade (tunnel.py). Knows their tasks; refuses to know protocols.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from wire.http.request_head import Headers
from wire.http.tunnel import Upgrading

OtherHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
SocketHandler = Callable[[Upgrading], Coroutine[Any, Any, None]]


class Others:
    def __init__(self, streams: OtherHandler | None, sockets: SocketHandler | None) -> None:
        """None: there is nobody who would take them."""
        self.streams = streams
        self.sockets = sockets
        self.tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False

    def serve_stream(self, transport: asyncio.Transport, data: bytes) -> None:
        """`data` is what was read of it: the handler reads it again."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._serve, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if data:
            protocol.data_received(data)

    def serve_socket(self, client: Upgrading) -> None:
        assert self.sockets is not None
        task = asyncio.get_running_loop().create_task(self.sockets(client))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cut(self) -> None:
        self._is_cut = True
        for task in tuple(self.tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self.streams is not None
        self.tasks.add(task)
        try:
            await self.streams(reader, writer)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
        finally:
            writer.close()
            self.tasks.discard(task)


def raw_head(method: bytes, url: bytes, version: bytes, headers: Headers, length: bytes | None) -> bytes:
    """A head that was parsed, as bytes again."""
    lines = [b"%s %s HTTP/%s" % (method, url, version)]
    lines += [b"%s: %s" % pair for pair in headers]
    if length is not None:
        lines.append(b"content-length: " + length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
