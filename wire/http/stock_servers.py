"""Hypercorn instead of our own ASGI server, because it also speaks HTTP/2.

The server that is used determines limits of connections and of slow heads, refusals of invalid requests, and close codes. Hypercorn is imported only
if it is chosen. Its defaults are made for short requests; each setting here changes one that harms streams.
"""

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.http.listen import ListenError
from pilotlight.wire.http.server import Server

SERVERS = ("own", "hypercorn")

PING_S = 20.0  # interval of pings: below 60 s, after which proxies take a silent WebSocket for dead


class HttpServer(Protocol):
    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None: ...

    async def stop(self, grace_s: float = 1.0) -> None: ...


def check_installed(name: str, find: Callable[[str], object] = find_spec) -> None:
    """Raise ListenError if the server is unknown or not installed."""
    if name not in SERVERS:
        raise ListenError(f"there is no server {name!r}: choose one of {', '.join(SERVERS)}")
    if name != "own" and find(name) is None:
        raise ListenError(f"[door] asks for the server {name}, which is not installed: `pip install {name}`")


def make_server(name: str, app: Application, limits: HttpLimits, **own: Any) -> HttpServer:
    """Return the server. `own` are additional arguments for our own server."""
    if name == "own":
        return Server(app, limits, **own)
    return HypercornServer(app, limits)


class HypercornServer:
    """HTTP/1.1, and HTTP/2 by ALPN, by prior knowledge and by h2c."""

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
        # the default is 1000; when it is reached, all HTTP/2 streams in progress fail
        config.keep_alive_max_requests = sys.maxsize
        # The default is 100 streams at a time, but a router sends all its streams over one connection.
        config.h2_max_concurrent_streams = 1024
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
