"""Notifications to the service manager that started the process (systemd's `Type=notify`), if any.

The protocol is sd_notify(3): lines of NAME=VALUE in one datagram to the socket in NOTIFY_SOCKET.
"""

import os
import socket
import time
from contextlib import suppress

SOCKET_ENV = "NOTIFY_SOCKET"
_END_S = 15.0  # time to end after a drain
_YEAR_S = 365 * 24 * 3600.0  # a drain without a limit


def notify_ready(status: str = "") -> None:
    """Report that the process serves, at its start or after a reload.
    `status` is a new line for `systemctl status`, if it has changed."""
    _notify("READY=1", *([f"STATUS={status}"] if status else ()))


def notify_status(status: str) -> None:
    """Change the line that `systemctl status` shows."""
    _notify(f"STATUS={status}")


def notify_reloading() -> None:
    """Report that the process reads its file again; `notify_ready` reports the end of that."""
    _notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def notify_stopping(drain_timeout_s: float = 0.0) -> None:
    """Report that the process drains and will end.

    The service manager waits for the drain timeout, even if the unit's `TimeoutStopSec` is less.
    """
    _notify("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={int(min(drain_timeout_s + _END_S, _YEAR_S) * 1e6)}")


def _notify(*lines: str) -> None:
    address = os.environ.get(SOCKET_ENV, "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # a name in Linux's abstract namespace
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(address)
        sender.sendall("\n".join(lines).encode())
