"""TCP for functions, at the runtime: resolves names, connects, and passes the socket to the isolate.

The egress policy decides what may be reached. An isolate sends packets, each with a socket for the reply (sdk/brokered_sockets.py). Buffers of
connections are small, because a function's limits do not count their kernel memory.
"""

import asyncio
import errno
import os
import socket
from contextlib import suppress

import msgspec

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.subrequests import Dial, Subrequests

MAX_QUESTION_BYTES = 2048
MAX_OPEN = 64  # unanswered requests per isolate
READ_AT_ONCE = 16


class BrokerQuestion(msgspec.Struct, frozen=True):
    """An isolate's request, as sdk/brokered_sockets.py sends it."""

    host: str
    port: int
    within: int = -1
    connects: bool = True


class SocketBroker:
    def __init__(self, asked: socket.socket, subrequests: Subrequests) -> None:
        """`asked` is the socket with the isolate's requests; the broker closes it."""
        self._socket = asked
        self._subrequests = subrequests
        self._answers: set[asyncio.Task[None]] = set()
        asked.setblocking(False)
        asyncio.get_running_loop().add_reader(asked.fileno(), self._read)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        for task in self._answers:
            task.cancel()

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MAX_QUESTION_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                for fd in fds:
                    os.close(fd)
                return self.close()
            for fd in fds:
                self._begin(data, fd)

    def _begin(self, data: bytes, fd: int) -> None:
        try:
            reply = socket.socket(fileno=fd)
        except OSError:  # not a socket
            os.close(fd)
            return
        reply.setblocking(False)
        if len(self._answers) >= MAX_OPEN:
            _send(reply, error=f"{MAX_OPEN} connections are already being opened", number=errno.EAGAIN)
            return reply.close()
        task = asyncio.ensure_future(self._answer(data, reply))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, data: bytes, reply: socket.socket) -> None:
        with reply:
            try:
                question = msgspec.msgpack.decode(data, type=BrokerQuestion)
                dial = Dial(question.host, question.port, question.within, question.connects)
                found = await self._subrequests.dial(dial)
            except Failure as failure:
                number = {"egress_denied": errno.EACCES, "too_many_subrequests": errno.EPERM}.get(str(failure.code), 0)
                return _send(reply, error=failure.message, number=number)
            except TimeoutError:
                return _send(reply, error="the connection timed out", number=errno.ETIMEDOUT)
            except OSError as error:  # its text has the number, which the isolate's error adds again
                return _send(reply, error=error.strerror or str(error), number=error.errno or 0)
            except (ValueError, msgspec.MsgspecError) as error:
                return _send(reply, error=str(error))
            if isinstance(found, socket.socket):
                with found:
                    return _send(reply, connected=found)
            _send(reply, addresses=found)


def _send(
    reply: socket.socket,
    *,
    error: str = "",
    number: int = 0,
    addresses: list[str] | None = None,
    connected: socket.socket | None = None,
) -> None:
    data = msgspec.msgpack.encode({"error": error, "errno": max(0, number), "addresses": addresses or []})
    with suppress(OSError):  # the isolate no longer waits
        socket.send_fds(reply, [data], [connected.fileno()] if connected is not None else [])
