"""The listening socket: it is bound at once and configured for streams, or the error names the cause."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pilotlight.wire.http.listen import (
    PARENT_PID_ENV,
    VANISHED,
    ListenError,
    bind,
    file_limit,
    follow_parent,
    raise_file_limit,
    url_of,
)
from tests.audit_events import observed_calls

pytestmark = pytest.mark.process


def test_a_port_in_use_is_named_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use; stop the process"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192.0.2.1 port 0: .*change \[listen\]"):
        bind("192.0.2.1", 0)


def test_accepted_sockets_send_small_events_at_once() -> None:
    listener = bind("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_the_url_names_the_port_that_was_given() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def followed(parent_pid: int) -> str:
    environment = {**os.environ, PARENT_PID_ENV: str(parent_pid)}
    command = [sys.executable, "-c", "from pilotlight.wire.http.listen import follow_parent; print(follow_parent())"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_process_whose_parent_is_gone_is_notified() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert followed(gone.pid) == "False"
    assert followed(os.getpid()) == "True"


def test_an_accepted_connection_whose_client_vanishes_ends_soon() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for option, value in VANISHED.items():
            if hasattr(socket, option):
                assert accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value


def test_a_port_below_1024_is_named_where_it_needs_privileges() -> None:
    made: list[object] = []

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "socket.bind":
            made.append(arguments[0])
            raise PermissionError(13, "Permission denied")

    with (
        observed_calls(refuse),
        pytest.raises(ListenError, match=r"port 80 needs privileges; set a listen\.port above 1023"),
    ):
        bind("127.0.0.1", 80)
    (listener,) = made
    assert isinstance(listener, socket.socket)
    assert listener.fileno() == -1, "the socket must be closed"
    with pytest.raises(ListenError, match=r"cannot listen on 127\.0\.0\.1 port 70000: .*; change \[listen\]"):
        bind("127.0.0.1", 70_000)


def test_an_unwatched_process_follows_no_parent_and_its_children_see_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_PID_ENV, raising=False)
    assert follow_parent()
    monkeypatch.setenv(PARENT_PID_ENV, "1")
    assert follow_parent(platform="other")
    assert PARENT_PID_ENV not in os.environ


class Limits:
    """A fake of the module `resource` with limits of open files."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

    def __init__(self, soft: int, hard: int, *, may_raise: bool = True) -> None:
        self.now = (soft, hard)
        self._may_raise = may_raise

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == self.RLIMIT_NOFILE
        return self.now

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert which == self.RLIMIT_NOFILE
        if not self._may_raise:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    for limits, most in (
        (Limits(1024, 65_536), 65_536),
        (Limits(1024, 65_536, may_raise=False), 1024),
        (Limits(1024, -1), None),
    ):
        raise_file_limit(limits)
        assert file_limit(limits) == most
    raise_file_limit(None)
    assert file_limit(None) is None


@pytest.mark.parametrize(
    ("name", "url"), [(("127.0.0.1", 80), "http://127.0.0.1:80"), (("::1", 80, 0, 0), "http://[::1]:80")]
)
def test_a_listeners_url_has_its_address_in_brackets_where_it_has_colons(name: tuple[object, ...], url: str) -> None:
    assert url_of(SimpleNamespace(getsockname=lambda: name)) == url
