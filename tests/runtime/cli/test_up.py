"""Servers that `pilotlight up` restarts when they end, and stops when it ends."""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.runtime.cli import up
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.sites.config import drained_sites_file, parse
from pilotlight.sites.site import SiteConfig
from tests.edge_router.builders import network


@pytest.mark.process
def test_a_port_that_cannot_be_used_is_refused_with_the_option_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(CliError, match=f"port {port} on 127.0.0.1 is in use; .* or set another --port"):
            up.require_free("127.0.0.1", port)
    with pytest.raises(CliError, match=r"cannot listen on 192\.0\.2\.1 port 0: .*; change --host"):
        up.require_free("192.0.2.1", 0)


class Server:
    name = "router"

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.exit_code: int | None = None
        self.started: list[float] = []

    def last_line(self) -> str:
        return "the port is taken"

    @property
    def started_at(self) -> float:
        return self.started[-1]

    def start(self) -> None:
        self.started.append(self.clock())
        self.exit_code = 1


def test_a_server_that_does_not_start_is_started_again_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    server = Server(lambda: now)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 5.0:
            raise up.Stop

    server.start()
    with pytest.raises(up.Stop):
        up.keep_alive(cast("Any", [server]), lambda: now, sleep)
    assert server.started == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert "router ended (the port is taken); starting it again." in capsys.readouterr().out


class Draining:
    """A server that needs a while to end after `terminate`."""

    def __init__(self, drain_timeout_s: float, takes_s: float) -> None:
        self.drain_timeout_s = drain_timeout_s
        self._takes_s = takes_s
        self.how = ""

    def terminate(self) -> None:
        self.how = "draining"

    def wait(self, timeout_s: float) -> bool:
        if self.how == "draining" and timeout_s >= self._takes_s:
            self.how = "ended"
        return self.how == "ended"

    def kill(self) -> None:
        self.how = "killed" if self.how == "draining" else self.how


@pytest.mark.parametrize(
    ("drain_timeout_s", "takes_s", "how"),
    [(30.0, 34.0, "ended"), (30.0, 36.0, "killed"), (0.0, 34.0, "killed"), (120.0, 121.0, "ended")],
)
def test_a_server_is_killed_only_after_its_own_drain_timeout(drain_timeout_s: float, takes_s: float, how: str) -> None:
    site, router = Draining(drain_timeout_s, takes_s), Draining(1.0, 2.0)
    up.end(cast("Any", [site, router]))
    assert (site.how, router.how) == (how, "ended")


class Hurried(Draining):
    """A server whose user presses Ctrl-C again at each of its signals."""

    def start(self) -> None:
        pass

    def terminate(self) -> None:
        super().terminate()
        os.kill(os.getpid(), signal.SIGINT)

    def kill(self) -> None:
        super().kill()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_user_who_presses_ctrl_c_many_times_gets_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    server, before = Hurried(30.0, 60.0), signal.getsignal(signal.SIGINT)
    with suppress(up.Stop), up.running(cast("Any", [server])):
        os.kill(os.getpid(), signal.SIGINT)
    assert server.how == "killed"
    assert capsys.readouterr().out.startswith("Stopping: open streams may finish")
    assert signal.getsignal(signal.SIGINT) is before


class Idle(Draining):
    def start(self) -> None:
        pass


def test_a_signal_for_workers_ends_no_network() -> None:
    server = Idle(30.0, 1.0)
    with up.running(cast("Any", [server])):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert server.how != "killed"


class StoppedEarly(Draining):
    """A server whose user presses Ctrl-C before the next one is started."""

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_user_who_presses_ctrl_c_while_servers_are_started_gets_no_traceback() -> None:
    server, other = StoppedEarly(30.0, 1.0), Draining(30.0, 1.0)
    with pytest.raises(up.Stop), up.running(cast("Any", [server, other])):
        pytest.fail("it was stopped before")
    assert (server.how, other.how) == ("ended", "ended")


def test_servers_have_the_drain_timeouts_of_their_files_and_no_site_stays_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76}
    models = [{"name": "ember", "source": "embedded:ember"}]
    values = {"name": "ams1", "place": place, "listen": {"port": 8791}, "models": models}
    site = parse(SiteConfig, {**values, "limits": {"drain_timeout_s": 90.0}}, "ams1.toml")
    router = network({"ams1": "http://127.0.0.1:8791"}, relay={"drain_timeout_s": 70.0})
    drained_sites_file().parent.mkdir(parents=True)
    drained_sites_file().write_text('["ams1"]')
    children = up.make_children(
        tmp_path / "network.toml", router, 8000, [(tmp_path / "ams1.toml", site)], verbose=False
    )
    assert {child.name: child.drain_timeout_s for child in children} == {"ams1": 90.0, "router": 70.0}
    assert not drained_sites_file().exists()
