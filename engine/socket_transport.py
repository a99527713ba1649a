"""A host's end of the ZeroMQ socket: commands in, events out, one frame each.

Knows frames and peers; refuses to know what a command does. A host serves one front end at a time: when another one
speaks, it has taken over.
"""

import logging

import msgspec
import zmq

from engine.frames import decode_command, encode
from engine.protocol import Command, Event
from engine.transport import NewFrontEnd

log = logging.getLogger(__name__)


class SocketTransport:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A frame that is dropped is a token that is lost, so queues are unbounded: a front end that stalls is
        # restarted by its site.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(address)
        self._peer: bytes | None = None

    def receive(self, timeout_s: float) -> list[Command | NewFrontEnd]:
        received: list[Command | NewFrontEnd] = []
        wait = self._socket.poll(int(timeout_s * 1000))
        while wait:
            peer, *frames = self._socket.recv_multipart()
            for frame in frames:
                try:
                    command = decode_command(frame)
                except msgspec.DecodeError as error:
                    log.error("a frame of %d bytes is no command of this protocol version: %s", len(frame), error)
                    continue
                if peer != self._peer:  # a peer that commands is the front end; one that sends nonsense is not
                    self._peer = peer
                    received.append(NewFrontEnd())
                received.append(command)
            wait = self._socket.poll(0)
        return received

    def send(self, event: Event) -> None:
        if self._peer is not None:
            self._socket.send_multipart((self._peer, encode(event)), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
