"""Notifications to systemd."""

import math
import socket
from pathlib import Path

import pytest

from pilotlight.support.service_manager import notify_stopping


@pytest.mark.process
@pytest.mark.parametrize(("drain_s", "most_s"), [(0.0, 15), (90.5, 105.5), (math.inf, 365 * 24 * 3600)])
def test_a_stop_takes_at_most_the_drain_and_some_seconds(
    drain_s: float, most_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notify_stopping(drain_s)
        assert manager.recv(1000) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=%d" % (most_s * 1e6)
