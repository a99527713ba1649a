"""The limit of one isolate's concurrent requests to its broker."""

import asyncio
import errno
import socket
from typing import Any, cast

import msgspec

from pilotlight.functions.host.network.socket_broker import MAX_OPEN, SocketBroker
from tests.asgi import eventually


class Silent:
    """Connections that are never established."""

    def __init__(self) -> None:
        self.num_dialled = 0

    async def dial(self, wanted: Any) -> None:
        self.num_dialled += 1
        await asyncio.Event().wait()


async def test_an_isolate_has_a_bounded_number_of_connections_on_their_way() -> None:
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent = Silent()
    broker = SocketBroker(asked, cast("Any", silent))
    question = msgspec.msgpack.encode({"host": "example.org", "port": 80, "within": -1, "connects": True})
    answers = []
    for number in range(MAX_OPEN + 1):
        mine, its = socket.socketpair()
        answers.append(mine)
        with its:
            socket.send_fds(asking, [question], [its.fileno()])
        await eventually(lambda number=number: silent.num_dialled == min(number + 1, MAX_OPEN))
    answers[-1].setblocking(False)
    told = msgspec.msgpack.decode(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(answers[-1], 4096), 60))
    assert (told["errno"], silent.num_dialled) == (errno.EAGAIN, MAX_OPEN)
    broker.close()
    for each in (asking, *answers):
        each.close()
