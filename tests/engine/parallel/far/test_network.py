"""Channels between machines accept only messages that are signed with the key of the group."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pilotlight.engine.parallel.channel import RankChannel
from pilotlight.engine.parallel.far.network import RankListener, connect, new_group_key

pytestmark = pytest.mark.process

LOCALHOST = "127.0.0.1"
KEY = new_group_key()


def joined(listener: RankListener, key: bytes) -> tuple[RankChannel, RankChannel]:
    with ThreadPoolExecutor() as threads:
        other = threads.submit(connect, LOCALHOST, listener.port, key)
        mine = listener.accept(5.0)
        assert mine is not None
        return mine, other.result()


def test_both_sides_hear_each_other_in_order_and_of_each_others_end() -> None:
    with RankListener(LOCALHOST, KEY) as listener:
        mine, other = joined(listener, KEY)
    for i in range(3):
        mine.send(i)
    assert [other.receive() for _ in range(3)] == [0, 1, 2]
    content = bytes(range(256)) * 4096
    sending = threading.Thread(target=other.send_bytes, args=(memoryview(content),))
    sending.start()
    received = bytearray(len(content))
    mine.receive_into(memoryview(received))
    sending.join()
    assert received == content
    mine.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def greet_with_another_key(port: int) -> None:
    try:
        channel = connect(LOCALHOST, port, new_group_key())
        channel.receive()
    except (OSError, EOFError):
        return
    raise AssertionError("a stranger was heard")


def say_something_else(port: int) -> None:
    with socket.create_connection((LOCALHOST, port)) as end:
        end.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            end.recv(100)


def say_nothing(port: int) -> None:
    with socket.create_connection((LOCALHOST, port), timeout=5) as end:
        end.recv(100)


@pytest.mark.parametrize("stranger", [greet_with_another_key, say_something_else, say_nothing])
def test_a_stranger_is_not_served_and_delays_no_other_for_long(stranger: Callable[[int], None]) -> None:
    with RankListener(LOCALHOST, KEY, handshake_s=0.5) as listener:
        thread = threading.Thread(target=stranger, args=(listener.port,), daemon=True)
        thread.start()
        assert listener.accept(5.0) is None
        thread.join()
    with RankListener(LOCALHOST, KEY) as listener:
        mine, other = joined(listener, KEY)
    mine.close()
    other.close()


def test_a_rank_does_not_follow_a_leader_with_another_key() -> None:
    with RankListener(LOCALHOST, new_group_key()) as listener:
        accepting = threading.Thread(target=listener.accept, args=(5.0,))
        accepting.start()
        with pytest.raises(OSError, match="certificate"):
            connect(LOCALHOST, listener.port, KEY)
        accepting.join()


def test_without_a_connection_accept_returns_none() -> None:
    with RankListener(LOCALHOST, KEY) as listener:
        assert listener.accept(0.01) is None
