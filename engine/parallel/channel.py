"""An ordered channel between two processes: a pair of sockets, which says at once when the other end has died, and leaves nothing.

Messages are this program's own values, from a process that has started the other: nobody else can write to it. Between machines that is so by
network.py.
"""

import os
import pickle
import select
import socket
import struct
import threading
from typing import Any, NamedTuple

NUM_CHANNELS = 3  # of a rank: orders; replies to those that are waited for; copies of blocks, by a thread of their own
_LENGTH = struct.Struct("<Q")


class Meeting(NamedTuple):
    """The place at which ranks find each other."""

    address: str  # of the first rank
    port: int  # of its store
    own: str  # this rank's address


class RankChannel:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> "tuple[RankChannel, socket.socket]":
        """Return one end, and the other as a socket that a process to be started inherits."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), other

    @classmethod
    def inherited(cls, fd: int) -> "RankChannel":
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def send(self, message: object) -> None:
        """Send a message, whole and behind all before it; from any thread. Raises OSError where the other end is gone."""
        self.send_packed(packed(message))

    def send_packed(self, message: bytes) -> None:
        """Send what `packed` has made of a message."""
        with self._sending:
            self._end.sendall(message)

    def receive(self) -> Any:
        """Wait for a message. Raises EOFError where the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def has_message(self) -> bool:
        """Tell whether `receive` would return, or raise, soon. Of a pair."""
        return bool(select.select([self._end], [], [], 0)[0])

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

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return data


def packed(message: object) -> bytes:
    """Return a message as it is sent, to whichever ranks."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data
