"""How each HTTP process of ours listens: its socket, Hypercorn's settings, its event loop, and its end when the process that started it dies.

The same for routers and sites. Hypercorn's defaults are made for short requests; each setting here undoes one that hurts streams. The module
refuses to know what is served.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from wire.http1_exchange import Application
from wire.hypercorn_connection import Connection
from wire.socket_stream import install as install_sockets

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

PARENT_PID_ENV = "PILOTLIGHT_PARENT_PID"
BACKLOG = 2048
KEEP_ALIVE_S = 75.0  # longer than any client's or router's pool keeps an idle connection: the client closes first, so no request races a close
GRACE_S = 1.0  # we drain before Hypercorn hears of the end; what is left then is idle connections


class ListenError(Exception):
    """The socket cannot be had; the message says what to change."""


def bind(host: str, port: int) -> socket.socket:
    """Listens at once, so that a port in use is known before anything else is started for nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Linux hands the option on to accepted sockets. Without it Nagle's algorithm and delayed acknowledgements hold a small event for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ListenError(_bind_sentence(host, port, error)) from None
    return listener


def _bind_sentence(host: str, port: int, error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        holder = f"`ss -ltnp 'sport = :{port}'` names it"
        return f"port {port} on {host} is in use; stop the process that holds it ({holder}) or set another listen.port"
    if code == errno.EACCES:
        return f"port {port} needs privileges; set a listen.port above 1023"
    return f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; change [listen]"


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hypercorn_config(listener: socket.socket | None) -> Config:
    """Takes the socket over, if one is given."""
    config = Config()
    if listener is not None:
        config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG  # default 100
    config.keep_alive_timeout = KEEP_ALIVE_S  # default 5
    config.keep_alive_max_requests = (
        sys.maxsize
    )  # the default of 1000 fails the HTTP/2 streams in flight when it is reached
    config.h2_max_concurrent_streams = 1024  # default 100: a router's single connection carries all its streams
    config.h11_max_incomplete_size = 64 << 10  # of a request's head; default 16 KiB
    config.graceful_timeout = GRACE_S
    config.include_server_header = False
    config.loglevel = "WARNING"
    return config


class H2:
    """HTTP/2 connections of a server that speaks HTTP/1.1 itself: Hypercorn serves them to the same application."""

    def __init__(self, app: Application) -> None:
        install_sockets()
        self._app = ASGIWrapper(app)
        self._config = hypercorn_config(None)
        self._context = WorkerContext(None)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        await Connection(self._app, loop, self._config, self._context, {}, reader, writer)

    async def stop(self) -> None:
        """Idle connections end; those at work are told to take no more."""
        await self._context.terminated.set()


def follow_parent() -> bool:
    """Where a parent asks for it, the kernel sends SIGTERM when that parent dies, so that a killed `pilotlight up` leaves nothing behind.

    False: the parent is gone already, and this process should end.
    """
    parent = os.environ.pop(PARENT_PID_ENV, None)  # not for this process's own children
    if parent is None or sys.platform != "linux":
        return True
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    return parent == str(os.getppid())  # else it died before the call


def raise_file_limit() -> None:
    """To what the system allows: every client and every site's answer is a file descriptor, and the usual soft limit of 1024 is soon spent."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int | None:
    return None if resource is None else int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where there is one (it is not made for every platform); asyncio's own serves as well, at half the speed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
