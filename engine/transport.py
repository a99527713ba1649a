"""How commands reach a host and events leave it: over a ZeroMQ socket, or through a queue inside one process.

Knows frames and peers; refuses to know what a command does. A host serves one front end at a time: when another one
speaks, it has taken over.
"""

import logging
import queue
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import zmq

from engine.protocol import Command, Event, decode_command, encode

log = logging.getLogger(__name__)


class NewFrontEnd(NamedTuple):
    """Whoever spoke before is gone: nobody waits for its sequences."""


class HostTransport(Protocol):
    def receive(self, timeout_s: float) -> list[Command | NewFrontEnd]:
        """Everything that has arrived, after waiting at most `timeout_s` for the first of it."""

    def send(self, event: Event) -> None: ...

    def close(self) -> None: ...


class SocketTransport:
    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A frame that is dropped is a token that is lost, so queues are unbounded: a front end that stalls is
        # restarted by whoever watches it.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(address)
        self._peer: bytes | None = None

    def receive(self, timeout_s: float) -> list[Command | NewFrontEnd]:
        received: list[Command | NewFrontEnd] = []
        wait = self._socket.poll(int(timeout_s * 1000))
        while wait:
            peer, *frames = self._socket.recv_multipart()
            if peer != self._peer:
                self._peer = peer
                received.append(NewFrontEnd())
            for frame in frames:
                try:
                    received.append(decode_command(frame))
                except msgspec.DecodeError as error:
                    log.error("a frame of %d bytes is no command of this protocol version: %s", len(frame), error)
            wait = self._socket.poll(0)
        return received

    def send(self, event: Event) -> None:
        if self._peer is not None:
            self._socket.send_multipart((self._peer, encode(event)), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class QueueTransport:
    """The same host loop in a thread of the front end's process."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_event = on_event

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Command | NewFrontEnd]:
        received: list[Command | NewFrontEnd] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                received.append(self._commands.get(timeout=0 if received else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return received

    def send(self, event: Event) -> None:
        self._on_event(event)

    def close(self) -> None:
        pass
