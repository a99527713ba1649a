"""Listening of HTTP processes: the socket, the event loop, open files, and the parent's end.

The same for routers and sites, independent of protocols.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

PARENT_PID_ENV = "PILOTLIGHT_PARENT_PID"
BACKLOG = 2048
# After so long without a word from its kernel a client is gone (the first in ms). Linux counts a full window as silence, too, and a reader may stall.
VANISHED = {"TCP_USER_TIMEOUT": 60_000, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
KEEP_ALIVE_S = 75.0  # longer than any client's or router's pool keeps an idle connection: the client closes first, so no request races a close
GRACE_S = 1.0  # for connections when the server stops: it has drained before, so the rest is idle


class ListenError(Exception):
    """The socket cannot be opened; the message names the correction."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens: a port in use is known before anything else is started.
    With `is_shared` several sockets may listen on the port, and the kernel spreads connections over them. Raises ListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Linux hands the option on to accepted sockets. Without it Nagle's algorithm and delayed acknowledgements hold a small event for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel would keep trying for a quarter of an hour when a client vanishes without closing. One whose answer is in progress is noticed
        # sooner (wire/http/server.py).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in VANISHED.items():
            if hasattr(socket, option):  # some systems lack an option
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ListenError(_bind_sentence(host, port, error)) from None
    return listener


def _bind_sentence(host: str, port: int, error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        holder = f"`ss -ltnp 'sport = :{port}'` shows it"
        return f"port {port} on {host} is in use; stop the process that holds it ({holder}) or set another listen.port"
    if code == errno.EACCES:
        return f"port {port} needs privileges; set a listen.port above 1023"
    return f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; change [listen]"


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' * is_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def follow_parent() -> bool:
    """Ask the kernel for SIGTERM when the parent process dies, if the parent wants it.

    So a killed `pilotlight up` leaves nothing running.

    Returns False if the parent is gone already, and this process should end.
    """
    parent = os.environ.pop(PARENT_PID_ENV, None)  # removed, so that this process's children do not inherit it
    if parent is None or sys.platform != "linux":
        return True
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    return parent == str(os.getppid())  # otherwise it died before the call


def raise_file_limit() -> None:
    """Raise the limit of open files to the system's maximum.

    Every client and every site's answer is a file descriptor, and the usual limit of 1024 is too low.
    """
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int | None:
    """Return the limit of open files; None if there is none, or it is unknown."""
    limit = None if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit is None or limit == resource.RLIM_INFINITY else int(limit)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop if it is installed, otherwise asyncio's, which is half as fast."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
