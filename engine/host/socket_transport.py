"""A host's end of the ZeroMQ socket: commands in, events out, one frame each.

This module is independent of what a command does. A host serves one front end at a time: the one that greeted it last, or the holder of a lease until
that expires.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from pilotlight.engine.api.frames import VersionError, decode_command, encode
from pilotlight.engine.api.protocol import Command, Event, FrontEndRefused, Hello, KeepAlive
from pilotlight.engine.host.transport import FrontEndGone

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

    from pilotlight.engine.api.keys import Keys

log = logging.getLogger(__name__)

_DOMAIN = "engine"
# Most time since the previous check that counts as silence, as a share of the lease: in a longer pause the host computed or was suspended, and did
# not listen.
_MOST_COUNTED = 0.25


class SocketTransport:
    def __init__(self, address: str, keys: "Keys | None" = None) -> None:
        """`keys`: only front ends with matching keys are accepted."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A dropped frame is a lost token, so queues are unbounded: a front end that stalls is restarted by its site.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._guard = None if keys is None else guard_socket(self._context, self._socket, keys)
        self._socket.bind(address)
        self._front_end: FrontEnd | None = None

    def receive(self, timeout_s: float) -> list[Command | FrontEndGone]:
        received: list[Command | FrontEndGone] = []
        wait = self._socket.poll(int(timeout_s * 1000))
        while wait:
            peer, *frames = self._socket.recv_multipart()
            for frame in frames:
                received += self._read(peer, frame)
            wait = self._socket.poll(0)
        if self._front_end is not None and self._front_end.is_silent():
            self._dismiss(f"this front end sent nothing for {self._front_end.lease_s:g} s, the length of its lease")
            received.append(FrontEndGone())
        return received

    def send(self, event: Event) -> None:
        if self._front_end is not None:
            self._socket.send_multipart((self._front_end.peer, encode(event)), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _read(self, peer: bytes, frame: bytes) -> list[Command | FrontEndGone]:
        try:
            command = decode_command(frame)
        except VersionError as error:
            self._refuse(peer, str(error))
            return []
        except msgspec.DecodeError as error:
            log.error("a frame of %d bytes is not a command of this protocol version: %s", len(frame), error)
            return []
        came: list[Command | FrontEndGone] = []
        if self._front_end is None or peer != self._front_end.peer:
            if not isinstance(command, Hello):
                self._refuse(peer, "this front end has not greeted the host, or another one has taken over")
                return []
            if self._front_end is not None and self._front_end.lease_s is not None:
                self._refuse(peer, f"another front end holds this host's lease of {self._front_end.lease_s:g} s")
                return []
            self._dismiss("another front end has taken over")
            self._front_end = FrontEnd(peer, command.lease_s)
            came.append(FrontEndGone())
        self._front_end.note_frame()
        if not isinstance(command, KeepAlive):
            came.append(command)
        return came

    def _dismiss(self, reason: str) -> None:
        if self._front_end is not None:
            self._refuse(self._front_end.peer, reason)
            self._front_end = None

    def _refuse(self, peer: bytes, reason: str) -> None:
        log.warning("refused a front end: %s", reason)
        self._socket.send_multipart((peer, encode(FrontEndRefused(reason))), flags=zmq.NOBLOCK)


class FrontEnd:
    """The peer that commands this host, and how long it has been silent while the host listened."""

    def __init__(self, peer: bytes, lease_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.peer = peer
        self.lease_s = lease_s
        self._clock = clock
        self._silent_s = 0.0
        self._looked_at = clock()

    def note_frame(self) -> None:
        self._silent_s, self._looked_at = 0.0, self._clock()

    def is_silent(self) -> bool:
        if self.lease_s is None:
            return False
        now = self._clock()
        self._silent_s += min(now - self._looked_at, _MOST_COUNTED * self.lease_s)
        self._looked_at = now
        return self._silent_s >= self.lease_s


def guard_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: "Keys"
) -> "ThreadAuthenticator":
    """Accept only peers with matching keys in the handshake."""
    from zmq.auth.thread import (
        ThreadAuthenticator,  # imports asyncio, which hosts without keys do not need
    )

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(_DOMAIN, _OnlyPeer(keys.peer))
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN.encode()  # with a domain, no peer is accepted unless the authenticator answers
    return guard


class _OnlyPeer:
    def __init__(self, peer: bytes) -> None:
        self._peer = peer

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._peer
