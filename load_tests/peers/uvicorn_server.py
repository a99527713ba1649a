"""uvicorn with settings for a fair comparison: a peer of benchmarks and of the fuzzer."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

from pilotlight.wire.http import stock_servers
from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.exchange import Application
from pilotlight.wire.http.stock_servers import PING_S, HttpServer

SERVERS = (*stock_servers.SERVERS, "uvicorn")


def make_server(name: str, app: Application, limits: HttpLimits) -> HttpServer:
    return UvicornServer(app, limits) if name == "uvicorn" else stock_servers.make_server(name, app, limits)


class UvicornServer:
    def __init__(self, app: Application, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits

    async def start(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        import uvicorn

        class Quiet(uvicorn.Server):  # type: ignore[misc, unused-ignore]
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are handled by the process itself

        config = uvicorn.Config(
            self._app, interface="asgi3", http="httptools", ws="wsproto", lifespan="off", log_config=None, log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=int(self._limits.keep_alive_s),
            ws_max_size=self._limits.max_message_bytes, ws_ping_interval=PING_S, ws_per_message_deflate=False,
            ssl_context_factory=None if context is None else lambda *_: context,
        )  # fmt: skip
        self._server = Quiet(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self, grace_s: float = 1.0) -> None:
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task
