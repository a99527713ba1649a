"""StartProgress: the progress of starting servers, one line each, with a bar while weights load.

On a terminal the lines are updated; elsewhere each change of state is printed once. It reads the published status. Independent of how the processes
start.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pilotlight.runtime.cli.api import Api
from pilotlight.wire.hop.status import SiteStatus, decode_status

PROBE_TIMEOUT_S = 2.0


class ServerStart:
    """The start of one server. `poll` queries its state."""

    def __init__(self, name: str, url: str, publishes_status: bool, admin_key: str = "") -> None:
        self.name = name
        self.ready = False
        self.state = "starting"
        self.loaded = 0.0  # share of the weights that are loaded
        self.failure: str | None = None  # reason why it cannot become ready without a change
        self._api = Api(url, PROBE_TIMEOUT_S, admin_key)
        self._publishes_status = publishes_status

    def poll(self) -> None:
        answer = self._api.probe("/readyz")
        if answer is None:
            return
        self.ready = answer[0] == 200
        if self.ready:
            self.state, self.loaded = "ready", 1.0
        elif self._publishes_status:
            self._read_status()

    def _read_status(self) -> None:
        answer = self._api.probe("/status")
        if answer is None or answer[0] != 200:
            return
        try:
            status = decode_status(answer[1])
        except msgspec.DecodeError:
            self.state = "answers, but is not a Pilotlight site"
            return
        failed = [model for model in status.models if model.residency == "failed"]
        if failed:
            self.state = self.failure = failed[0].detail
        else:
            self.state, self.loaded = _describe(status)


def _describe(status: SiteStatus) -> tuple[str, float]:
    loading = [model for model in status.models if model.residency == "loading"]
    if not loading:
        return "starting its engine", 0.0
    share = sum(model.loaded for model in loading) / len(loading)
    return f"loading {', '.join(model.name for model in loading)}", share


class StartProgress:
    """Displays the start of several servers."""

    def __init__(self, console: Console, servers: list[ServerStart]) -> None:
        self._console, self._servers = console, servers
        self._printed: dict[str, str] = {}
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description:<8}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._bar:
            for server in self._servers:
                self._tasks[server.name] = self._bar.add_task(server.name, total=1.0, state=server.state)
            yield

    def poll(self) -> bool:
        """Query every server that is not ready; return whether all are ready."""
        for server in self._servers:
            if not server.ready:
                server.poll()
            self._bar.update(self._tasks[server.name], completed=server.loaded, state=server.state)
            if (
                server.failure is None
                and not self._console.is_terminal
                and self._printed.get(server.name) != server.state
            ):
                self._printed[server.name] = server.state
                self._console.print(f"  {server.name}: {server.state}", highlight=False, soft_wrap=True)
        return all(server.ready for server in self._servers)
