"""ScatteredNetwork: a router and its sites as an operator runs them on several machines.

Each is a process with its own file, environment and limits. `LocalNetwork` instead runs `pilotlight up`: one command with one environment. A member
that ends is started again, as systemd would.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from load_tests.local_network import LocalNetwork
from pilotlight.wire.hop.headers import HOP_SECRET_ENV

ROOT = Path(__file__).parents[2]
SECRET = "a secret of this measurement alone"
ROUTER = "router"


@dataclass(frozen=True)
class Differently:
    """A change to the start of one member.

    `edit` changes the text of its file; `wrapper` is a command that runs its command, such as `prlimit --nofile=64`.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    edit: Callable[[str], str] = str
    wrapper: Sequence[str] = ()


class Member:
    """One process that is restarted a second after it ends."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log, self.starts = name, log, 0
        self._command, self.environment = command, dict(environment)  # used by the next start
        self._is_wanted = True
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

    def start_again_if_it_ended(self) -> None:
        if self._is_wanted and self.process.poll() is not None:
            self.start()

    def end(self) -> None:
        self._is_wanted = False
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)  # the second signal ends it at once: open streams have been judged

    def wait(self) -> None:
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ScatteredNetwork(LocalNetwork):
    """A context manager around a router and its sites. `members` has them by name.

    Raises RuntimeError if the `expected` ones (all if unset) are not healthy within the timeout.
    """

    def __init__(
        self,
        differently: Mapping[str, Differently] | None = None,
        names: Sequence[str] | None = None,
        expected: Sequence[str] | None = None,
        start_timeout_s: float = 90.0,
        workers: int = 1,
    ) -> None:
        super().__init__(start_timeout_s)
        self.workers = workers  # processes of the router
        self._differently = differently or {}
        self._names, self._expected = names, expected
        self.members: dict[str, Member] = {}

    def __enter__(self) -> "ScatteredNetwork":
        self._folder = tempfile.TemporaryDirectory(prefix="pilotlight-")
        self.folder = Path(self._folder.name)
        port = self._write_files(self.folder)
        self.url = f"http://127.0.0.1:{port}"
        self._leave_out()
        self._stopped = threading.Event()
        try:
            for name in (*self.site_urls, ROUTER):
                self.members[name] = self._member(name)
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()
            self.wait_until_up(self._expected)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for member in reversed(self.members.values()):
            member.end()
        for member in reversed(self.members.values()):
            member.wait()
        self._folder.cleanup()

    def processes(self) -> list[psutil.Process]:
        found = []
        for member in self.members.values():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(member.process.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def log(self, name: str) -> str:
        return self.members[name].log.read_text(errors="replace")

    def wait_until_up(self, names: Sequence[str] | None = None) -> None:
        """Return when the router finds these sites (all if unset) healthy."""
        from load_tests.scenarios.site_death import site_views

        wanted = set(self.site_urls if names is None else names)
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                healthy = {view.site for view in site_views(self) if view.state == "healthy"}
            except (urllib.error.URLError, OSError):
                healthy = set()
            if (wanted and wanted <= healthy) or (not wanted and self._listens()):
                return
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{name}: {member.log.read_text(errors='replace')[-1500:]}" for name, member in self.members.items()
                )
                raise RuntimeError(f"only {sorted(healthy)} were healthy after {self._start_timeout_s:g} s:\n{logs}")
            time.sleep(0.1)

    def _listens(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/livez", timeout=5).close()
        except OSError:
            return False
        return True

    def _leave_out(self) -> None:
        if self._names is None:
            return
        path = self.folder / "network.toml"
        head, *tables = path.read_text().split("[[sites]]")
        kept = [table for table in tables if any(f'name = "{name}"' in table for name in self._names)]
        path.write_text("[[sites]]".join([head, *kept]))
        self.site_urls = {name: url for name, url in self.site_urls.items() if name in self._names}

    def _member(self, name: str) -> Member:
        how = self._differently.get(name, Differently())
        file = self.folder / ("network.toml" if name == ROUTER else f"{name}.toml")
        file.write_text(how.edit(file.read_text()))
        module = "pilotlight.edge_router" if name == ROUTER else "pilotlight.runtime"
        environment = {
            **os.environ, HOP_SECRET_ENV: SECRET, "XDG_STATE_HOME": str(self.folder / name),
            "PILOTLIGHT_PARENT_PID": str(os.getpid()), **how.environment,
        }  # fmt: skip
        command = [*how.wrapper, sys.executable, "-m", module, str(file)]
        if name == ROUTER and self.workers > 1:
            command += ["--workers", str(self.workers)]
        return Member(name, command, environment, self.folder / f"{name}.log")

    def _keep(self) -> None:
        while not self._stopped.wait(1.0):
            for member in self.members.values():
                member.start_again_if_it_ended()
