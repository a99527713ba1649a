"""Connections that Hypercorn serves for us: those of HTTP/2, and WebSockets at a site. Imported by the first of them (wire/http/handover.py).

Hypercorn's defaults are made for short requests; each setting here undoes one that hurts streams. A connection of Hypercorn's own waits for
`keep_alive_timeout` although its client has left and nothing can come any more; ours ends. The module refuses to know what is served.
"""

import asyncio
import sys

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated

from wire.http.exchange import Application
from wire.http.socket_stream import install as install_sockets

MAX_HEAD_BYTES = 1 << 20  # a handshake's head has passed our own limits already


class Hypercorn:
    """All connections of one application."""

    def __init__(self, app: Application, keep_alive_s: float, max_message_bytes: int) -> None:
        install_sockets()
        self._app = ASGIWrapper(app)
        self._config = _config(keep_alive_s, max_message_bytes)
        self._context = WorkerContext(None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        await Connection(self._app, loop, self._config, self._context, {}, reader, writer)

    async def stop(self) -> None:
        """Idle connections end; those at work are told to take no more."""
        await self._context.terminated.set()


class Connection(TCPServer):
    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and event.idle and self.reader.at_eof():
            return  # an answer that was still on its way is complete, and no request will follow it
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


def _config(keep_alive_s: float, max_message_bytes: int) -> Config:
    config = Config()
    config.keep_alive_timeout = keep_alive_s  # default 5
    config.keep_alive_max_requests = (
        sys.maxsize
    )  # the default of 1000 fails the HTTP/2 streams in flight when it is reached
    config.h2_max_concurrent_streams = 1024  # default 100: a router's single connection carries all its streams
    config.h11_max_incomplete_size = MAX_HEAD_BYTES
    config.websocket_max_message_size = max_message_bytes
    config.include_server_header = False
    config.loglevel = "WARNING"
    return config
