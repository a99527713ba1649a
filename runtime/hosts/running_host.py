"""The interfaces of an engine host's process and of its launcher, as the supervisor uses them.

Tests replace them by fakes; launch.py has the real ones."""

from typing import Protocol

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.step_journal import HeldSequences


class RunningHost(Protocol):
    """A started host process."""

    @property
    def client(self) -> EngineClient: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def url(self) -> str | None:
        """The address of its socket."""

    @property
    def peer_address(self) -> str | None:
        """The address at which it serves its KV blocks to the site's other hosts; None if it serves none."""

    async def exited(self) -> str:
        """Wait for the end of the process; return how it ended, as a sentence."""

    @property
    def has_crashed(self) -> bool:
        """Tell whether it has ended by a signal that damaged code or a damaged file under a map ends in."""

    @property
    def ended_by_itself(self) -> bool:
        """Tell whether it ended by its own error or signal, and not because another process ended it."""

    @property
    def is_suspended(self) -> bool:
        """Tell whether another process has suspended it, so that it could take no step."""

    def held(self) -> HeldSequences:
        """Return the sequences that the host recorded last for its steps."""

    async def stop(self, grace_s: float) -> None:
        """Ask the host to end, and kill it after `grace_s`. Harmless after its end."""


class Launcher(Protocol):
    async def launch(self, *, standby: bool = False, afresh: bool = False) -> RunningHost:
        """Launch a host.

        With `standby` no request waits for it: it prepares thoroughly, at low priority. With `afresh` it deletes all generated files of earlier
        hosts.

        `afresh`: it believes no file that hosts before it have generated, and removes them.
        """

    def close(self) -> None:
        """Record that no further host is launched, and the last has ended."""
