"""What a supervisor needs of an engine host's process and of what starts it: the seam behind which tests put fakes. launch.py has the real ones."""

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
        """Where its socket listens."""

    @property
    def peer_address(self) -> str | None:
        """Where it serves its KV blocks to the site's other hosts; None: it serves none."""

    async def exited(self) -> str:
        """Return when the process has ended: a sentence that says how."""

    @property
    def has_crashed(self) -> bool:
        """Tell whether it has ended by a signal that damaged code or a damaged file under a map ends in."""

    @property
    def ended_by_itself(self) -> bool:
        """Tell whether it has ended by an error or a signal of its own, and not because somebody ended it."""

    @property
    def is_suspended(self) -> bool:
        """Tell whether somebody has stopped the process, so that it could take no step."""

    def held(self) -> HeldSequences:
        """Return the sequences that it noted last to be at work for."""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`. Harmless on one that has ended."""


class Launcher(Protocol):
    async def launch(self, *, standby: bool = False, afresh: bool = False) -> RunningHost:
        """`standby`: no request waits for it; it is made ready thoroughly and at low priority.

        `afresh`: it believes no file that hosts before it have generated, and removes them."""

    def close(self) -> None:
        """Note that no further host is launched, and the last has ended."""
