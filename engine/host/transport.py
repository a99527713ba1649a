"""The transport of commands and events between front end and host.

socket_transport.py implements it between processes. This module is independent of what a command does.
"""

from typing import NamedTuple, Protocol

from pilotlight.engine.api.protocol import Command, Event


class FrontEndGone(NamedTuple):
    """An event: the front end of the open sequences is gone.

    Another front end has taken over, or the lease of the last one has expired.
    """


class HostTransport(Protocol):
    def receive(self, timeout_s: float) -> list[Command | FrontEndGone]:
        """Return all commands that have arrived, after waiting at most `timeout_s` for the first."""

    def send(self, event: Event) -> None: ...

    def close(self) -> None: ...
