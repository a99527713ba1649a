"""Servers that `pilotlight up` restarts when they end."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from pilotlight.runtime.cli import up


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
