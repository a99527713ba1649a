"""The listening socket: had at once and set for streams, or refused with one sentence."""

import os
import socket
import subprocess
import sys

import pytest

from wire.http.listen import PARENT_PID_ENV, VANISHED, ListenError, bind, url_of


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
    command = [sys.executable, "-c", "from wire.http.listen import follow_parent; print(follow_parent())"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_process_whose_parent_is_gone_is_told_so() -> None:
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
