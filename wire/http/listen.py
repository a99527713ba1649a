"""Listening of HTTP processes: the socket, the event loop, open files, and the parent's end.

It is the same for routers and sites, and independent of protocols.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

try:
    import resource
except ImportError:  # not on Unix
    resource = None  # type: ignore[assignment]

PARENT_PID_ENV = "PILOTLIGHT_PARENT_PID"
BACKLOG = 2048
# A client is gone if its kernel sends nothing for these times. TCP_USER_TIMEOUT (in ms, the others in s) is long, because Linux also counts a full
# receive window as silence, which a slow reader may have.
VANISHED = {"TCP_USER_TIMEOUT": 60_000, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Time for which an idle connection is kept: longer than in clients' and routers' pools, so that they close first and no request crosses a close.
KEEP_ALIVE_S = 75.0
GRACE_S = 1.0  # time for open requests when the server stops; it has drained before, so most connections are idle


class ListenError(Exception):
    """The socket cannot be opened; the message names the correction."""


def bind(
    host: str, port: int, *, is_shared: bool = False, port_key: str = "listen.port", host_key: str = "[listen]"
) -> socket.socket:
    """Return a listening socket, so that a port in use is known before anything else starts.
    With `is_shared` several sockets may listen on the port, and the kernel spreads connections over them.

    Raises ListenError with the key of a file, or the option of a command, to change: `port_key` or `host_key`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit the option in Linux. Without it Nagle's algorithm and delayed acknowledgements delay a small event by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # When a client vanishes without closing, the kernel would retry for a quarter of an hour. During an answer it is noticed sooner
        # (wire/http/server.py).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in VANISHED.items():
            if hasattr(socket, option):  # some systems lack an option
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ListenError(bind_sentence(host, port, error, port_key, host_key)) from None
    return listener


def bind_sentence(host: str, port: int, error: Exception, port_key: str, host_key: str) -> str:
    """Return why a socket cannot be bound, with the change to make."""
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        holder = f"`ss -ltnp 'sport = :{port}'` shows it"
        return f"port {port} on {host} is in use; stop the process that holds it ({holder}) or set another {port_key}"
    if code == errno.EACCES:
        return f"port {port} needs privileges; set a {port_key} above 1023"
    return f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; change {host_key}"


def url_of(listener: socket.socket, *, is_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' * is_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def follow_parent(platform: str = sys.platform) -> bool:
    """Make the kernel send SIGTERM to this process when its parent dies, if the parent asked for it.

    So a killed `pilotlight up` leaves nothing running.

    Returns False if the parent is gone already, and this process should end.
    """
    parent = os.environ.pop(PARENT_PID_ENV, None)  # removed, so that this process's children do not inherit it
    if parent is None or platform != "linux":
        return True
    from pilotlight.support.parent_death import notify_at_parents_death  # imports ctypes, which takes 10 ms

    notify_at_parents_death(signal.SIGTERM)
    return parent == str(os.getppid())  # False if the parent died before the call


def raise_file_limit(limits: Any = resource) -> None:
    """Raise the limit of open files to the system's maximum.

    Each client and each connection to a site needs a file descriptor, and the usual limit of 1024 is too low. `limits` is the module `resource`;
    None if the system has no such limits.
    """
    if limits is not None:
        _, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # some systems report a hard limit that they do not allow
            limits.setrlimit(limits.RLIMIT_NOFILE, (hard, hard))


def file_limit(limits: Any = resource) -> int | None:
    """Return the limit of open files; None if there is none or it is unknown."""
    limit = None if limits is None else limits.getrlimit(limits.RLIMIT_NOFILE)[0]
    return None if limit is None or limit == limits.RLIM_INFINITY else int(limit)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop's event loops; None if uvloop is not installed.
    asyncio's own loop is half as fast."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
