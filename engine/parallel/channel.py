"""An ordered channel between two processes: a pair of sockets, closed as soon as the other end dies.

Messages are pickled Python objects, so only a process that this one has started may write to the channel. Between machines, network.py ensures that.
"""

import os
import pickle
import select
import socket
import struct
import threading
from typing import Any, NamedTuple

NUM_CHANNELS = 3  # per rank: for orders, for replies to orders, and for copies of blocks (by a separate thread)
_LENGTH = struct.Struct("<Q")


class Meeting(NamedTuple):
    """The addresses by which ranks find each other."""

    address: str  # address of the first rank
    port: int  # port of the first rank's store
    own: str  # address of this rank


class RankChannel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> "tuple[RankChannel, socket.socket]":
        """Return one end as a channel, and the other as a socket that a child process inherits."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), other

    @classmethod
    def inherited(cls, fd: int) -> "RankChannel":
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def send(self, message: object) -> None:
        """Send a message after all earlier messages, from any thread.

        Raises OSError if the other end is gone.
        """
        self.send_packed(packed(message))

    def send_packed(self, message: bytes) -> None:
        """Send a message that `packed` has encoded."""
        with self._sending:
            self._end.sendall(message)

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError if the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def has_message(self) -> bool:
        """True if `receive` would not wait for long. Only for a pair of sockets."""
        return self._has_event(select.POLLIN)

    @property
    def is_gone(self) -> bool:
        """Tell whether the other end has closed the connection, without reading from it."""
        return self._has_event(select.POLLRDHUP)

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes that `receive_into` expects."""
        with self._sending:
            self._end.sendall(data)

    def receive_into(self, into: memoryview) -> None:
        """Fill memory with bytes that `send_bytes` has sent. Raises EOFError."""
        while into:
            try:
                count = self._end.recv_into(into)
            except OSError:
                count = 0
            if not count:
                raise EOFError("the other end is gone")
            into = into[count:]

    def close(self) -> None:
        self._end.close()

    def _has_event(self, event: int) -> bool:
        """Tell whether the socket has this event or an error. `select` would refuse descriptors above 1,023."""
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(0))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return data


def packed(message: object) -> bytes:
    """Return an encoded message, which can be sent to several ranks."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data
