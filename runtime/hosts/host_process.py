"""A started engine host process: its client, and how it ended.

To stop it, it is sent SIGTERM, and is killed if it does not end; supervisor.py decides when.
"""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from pathlib import Path

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.step_journal import HeldSequences, read_journal
from pilotlight.runtime.hosts.socket_directory import SocketDirectory
from pilotlight.runtime.telemetry.process_exit import ending, is_oom_kill, oom_kills

CRASHES = {-signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV}
# Signals that a process's own code causes. Others come from outside: an operator, a supervisor, or the kernel's OOM killer.
OWN_SIGNALS = CRASHES | {-signal.SIGABRT, -signal.SIGFPE, -signal.SIGSYS, -signal.SIGTRAP}
CLOSE_WITHIN_S = 5.0  # limit of the time for a socket's last messages, which take at most a second


class HostProcess:
    """A started engine host process."""

    def __init__(
        self, process: Process, client: EngineClient, place: SocketDirectory, peer_address: str | None = None
    ) -> None:
        self._process = process
        self.client = client
        self._place = place
        self._oom_kills = oom_kills()
        self.url = place.address  # address of its socket
        self.peer_address = peer_address  # address for its KV blocks to the site's other hosts; None if not served

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def exited(self) -> str:
        """Wait until the process has ended; return a sentence with the reason."""
        code = await self._process.wait()
        return f"the engine host (pid {self._process.pid}) {ending(code, self._oom_kills)}"

    @property
    def has_crashed(self) -> bool:
        """Tell whether the process ended by a signal of damaged code, or of a damaged file in a memory map."""
        return self._process.returncode in CRASHES

    @property
    def ended_by_itself(self) -> bool:
        """Tell whether the process ended by its own error or signal, and was not killed from outside."""
        code = self._process.returncode
        return code is not None and (code > 0 or code in OWN_SIGNALS)

    @property
    def was_killed(self) -> bool:
        """Tell whether a signal from outside ended the process, such as an operator's.

        Call it before `stop`, which sends signals itself. False after the OOM killer: the next host may need as much memory.
        """
        code = self._process.returncode
        return code is not None and code < 0 and code not in OWN_SIGNALS and not is_oom_kill(code, self._oom_kills)

    @property
    def is_suspended(self) -> bool:
        """Tell whether the process was stopped by a signal (state T or t in proc(5))."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def held(self) -> HeldSequences:
        """Return the sequences that the host has last recorded as open."""
        return read_journal(self._place.journal)

    async def stop(self, grace_s: float) -> None:
        """Stop the process, kill it if it lives after `grace_s`, and remove the directory of its socket."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.client.close(), CLOSE_WITHIN_S)
            if self._process.returncode is None and grace_s > 0:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._place.remove()
