"""Child: a server process that a command starts, with its log.

The process dies with its parent, even if the parent is killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from pilotlight.runtime.telemetry.process_exit import ending, oom_kills
from pilotlight.support.signals import hold_signals, release_signals

LONGEST_LOG_BYTES = 16 << 20  # a longer log becomes LOG.1 at the next start
KILL_AFTER_S = 5.0  # a server is killed if it still runs so long after its own drain timeout


class Child:
    def __init__(
        self,
        name: str,
        arguments: list[str],
        log: Path,
        environment: dict[str, str],
        verbose: bool,
        drain_timeout_s: float,
    ) -> None:
        """`drain_timeout_s` is the time that the server gives to open requests after `terminate`."""
        self.name, self.log, self.started_at = name, log, 0.0
        self.drain_timeout_s = drain_timeout_s
        self._command = [sys.executable, "-m", *arguments]
        self._environment, self._verbose = environment, verbose
        self._process: subprocess.Popen[bytes] | None = None
        self._said_from = 0  # offset in the log where this process's lines start
        self._oom_kills: int | None = None

    def start(self) -> None:
        """Start the process.

        It gets a new session, so that Ctrl-C in the terminal does not reach it, and the command can end its children in order.
        """
        environment = {**os.environ, **self._environment, "PILOTLIGHT_PARENT_PID": str(os.getpid())}
        self.started_at = time.monotonic()
        self._oom_kills = oom_kills()
        with suppress(FileNotFoundError):
            if self.log.stat().st_size > LONGEST_LOG_BYTES:
                self.log.replace(self.log.with_name(f"{self.log.name}.1"))
        self.log.touch(0o600)
        with self.log.open("ab") as log:  # appends, because the last lines of the previous process explain its end
            self._said_from = log.tell()
            output = None if self._verbose else log
            hold_signals()
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            finally:
                release_signals()

    @property
    def exit_code(self) -> int | None:
        """The exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Send SIGHUP, at which the process reads its file again."""
        self._signal(signal.SIGHUP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; return False if it still runs after the timeout."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_line(self) -> str:
        """Return how the process ended, with the last line of its log."""
        code = self.exit_code
        how = "it has not ended" if code is None else f"it {ending(code, self._oom_kills)}"
        with self.log.open("rb") as log:
            log.seek(self._said_from)
            lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
        return f"{how}; its last line: {lines[-1]}" if lines else f"{how} and said nothing"

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
