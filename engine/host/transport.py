"""The transport of commands and events between front end and host, and its form within one process.

socket_transport.py has the form between processes. Does not know what a command does, and needs only the standard library.
"""

import queue
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pilotlight.engine.api.protocol import Command, Event


class FrontEndGone(NamedTuple):
    """An event: the open sequences have no reader.

    Another front end has taken over, or the lease of the last one has expired.
    """


class HostTransport(Protocol):
    def receive(self, timeout_s: float) -> list[Command | FrontEndGone]:
        """Return all commands that have arrived, after waiting at most `timeout_s` for the first."""

    def send(self, event: Event) -> None: ...

    def close(self) -> None: ...


class QueueTransport:
    """A transport for a host loop in a thread of the front end's process."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_event = on_event

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Command | FrontEndGone]:
        received: list[Command | FrontEndGone] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                received.append(self._commands.get(timeout=0 if received else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return received

    def send(self, event: Event) -> None:
        self._on_event(event)

    def close(self) -> None:
        pass
