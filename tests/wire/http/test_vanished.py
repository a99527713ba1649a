"""A client that acknowledges no bytes has vanished; a client that acknowledges bytes but does not read them has not."""

import asyncio
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

import pytest

from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.server import SILENT_MS, client_has_vanished, is_silent
from tests.asgi import eventually
from tests.edge_router.raw import wire
from tests.wire.http.test_connection import Client, Transport
from tests.wire.http.test_server import served


def tcp_info(unacked: int, last_ack_ms: int) -> bytes:
    return bytes(24) + struct.pack("=I", unacked) + bytes(28) + struct.pack("=I", last_ack_ms)


@pytest.mark.parametrize(
    ("unacked", "last_ack_ms", "silent"),
    [(0, 10 * SILENT_MS, False), (3, SILENT_MS, False), (3, SILENT_MS + 1, True), (3, 0, False)],
)
def test_bytes_that_are_not_acknowledged_for_long_are_silence(unacked: int, last_ack_ms: int, silent: bool) -> None:
    assert is_silent(tcp_info(unacked, last_ack_ms)) is silent


def test_what_is_no_tcp_connection_has_not_vanished() -> None:
    ends = socket.socketpair()
    assert not any(map(client_has_vanished, ends))
    for end in ends:
        end.close()
    assert not client_has_vanished(ends[0])
    assert not client_has_vanished(None)
    assert not is_silent(b"")


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the struct is Linux's")
def test_a_connection_whose_client_does_not_read_has_not_vanished() -> None:
    silent_ms = -1  # any connection with unacknowledged bytes counts as silent
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            assert not client_has_vanished(server, silent_ms)
            server.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    server.send(bytes(65536))
            assert client.getpeername() == server.getsockname()
            info = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            assert client_has_vanished(server, silent_ms) == (struct.unpack_from("=I", info, 24)[0] > 0)


@pytest.mark.process
async def test_an_answer_is_not_computed_on_for_a_client_that_client_has_vanished() -> None:
    at_work, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        at_work.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    limits = HttpLimits(sweep_s=0.01)
    async with (
        served(app, limits, has_vanished=lambda sock: sock is not None and at_work.is_set()) as server,
        wire(server.url) as idle,  # type: ignore[attr-defined]
        wire(server.url) as client,  # type: ignore[attr-defined]
    ):
        await client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 60)
        await eventually(lambda: len(server.connections) == 1)
        assert server.cut["vanished"] == 1
        assert not idle.reader.at_eof(), "a client without an open request is not cut"


@pytest.mark.process
async def test_a_connection_that_is_lost_during_a_sweep_is_not_checked() -> None:
    checked: list[Transport] = []

    class Checked(Transport):
        """Is its own socket. When the kernel is asked about it, all other connections are lost."""

        def get_extra_info(self, name: str) -> Any:
            return self if name == "socket" else super().get_extra_info(name)

        def getsockopt(self, *_: object) -> bytes:
            checked.append(self)
            for client in clients:
                if client.transport is not self:
                    client.connection.connection_lost(None)
            return b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(app, HttpLimits(sweep_s=0.01)) as server:
        clients = [Client(server, Checked()) for _ in range(2)]
        for client in clients:
            client.connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(lambda: len(checked) >= 2)
        assert len(set(checked)) == 1
        for client in clients:
            client.connection.connection_lost(None)
