"""Hypercorn with settings for a fair comparison: a peer of benchmarks and of the fuzzer.

Its defaults are made for short requests; each setting here changes one that harms streams.
"""

import asyncio
import socket
import ssl
import sys
from typing import Any, Protocol

from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.exchange import Application

PING_S = 20.0  # interval of pings: below 60 s, after which proxies take a silent WebSocket for dead


class HttpServer(Protocol):
    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None: ...

    async def stop(self, grace_s: float = 1.0) -> None: ...


class HypercornServer:
    def __init__(self, app: Application, limits: HttpLimits) -> None:
        self._app = _without_lifespan(app)
        self._limits = limits
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config, Sockets

        class Listening(Config):
            """Hypercorn's configuration for a bound socket, with a certificate that may be replaced."""

            ssl_enabled = context is not None

            def create_sockets(self) -> Sockets:
                return Sockets([listener] if context else [], [] if context else [listener], [])

            def create_ssl_context(self) -> ssl.SSLContext | None:
                return context

        config = Listening()
        config.keep_alive_timeout = self._limits.keep_alive_s  # the default is 5 s
        config.keep_alive_max_requests = sys.maxsize  # the default is 1000
        config.h11_max_incomplete_size = self._limits.max_head_bytes
        config.websocket_max_message_size = self._limits.max_message_bytes
        config.websocket_ping_interval = PING_S
        config.include_server_header = False
        config.loglevel = "WARNING"
        self._config = config
        self._task = asyncio.create_task(serve(self._app, config, shutdown_trigger=self._stop.wait))

    async def stop(self, grace_s: float = 1.0) -> None:
        assert self._task is not None
        self._config.graceful_timeout = grace_s
        self._stop.set()
        await self._task


def _without_lifespan(app: Application) -> Application:
    """Skip the lifespan: the application is started already."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await app(scope, receive, send)
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return served
