"""The front end's client of an engine host in another process, over a ZeroMQ socket."""

import asyncio
import os

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.frames import VersionError, decode_event, encode
from pilotlight.engine.api.keys import Keys
from pilotlight.engine.api.protocol import VERSION, Command, Hello, KeepAlive, Shutdown

LEASE_S = 10.0  # how long a host on another machine keeps the sequences of a silent front end
_RENEWALS = 4  # number of KeepAlive messages per lease
_LAST_WORD_S = 1.0  # time limit of `close` for sending the last messages
_LOOK_MS = 2  # interval of attempts to connect to a host that does not listen yet, which may delay its first answer
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class SocketEngineClient(EngineClient):
    """A client of a host at `ipc://PATH` or `tcp://HOST:PORT`, which may start after the client."""

    def __init__(self, address: str, keys: Keys | None = None, lease_s: float = LEASE_S) -> None:
        """Make a client. `keys`: the front end's keys, for a host on another machine.

        Such a host aborts the sequences after `lease_s` without a message.
        """
        super().__init__(Hello(VERSION, lease_s if keys else None))
        self._address = address
        self._keys = keys
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        if self._context is None:
            self.fail("the client was closed")
            return
        if self.death is None:
            self.send(Shutdown())
            self.fail("the client was closed")
        else:
            self._drop_unsent()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Disable the monitor before its socket is closed, because ZeroMQ would wait forever to report to a closed socket.
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        await asyncio.to_thread(self._context.term)  # waits until the last frame is sent or has timed out
        self._context = None

    def _connect(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        self._socket.set_hwm(0)  # commands are few and must not be dropped
        # Set LINGER before connecting: a disconnection applies the value set at that moment, and the default, infinite, would block `term` forever.
        self._socket.setsockopt(zmq.LINGER, round(_LAST_WORD_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, _LOOK_MS)
        if self._keys is not None:
            self._secure(self._keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._socket.connect(self._address)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        if self._greeting.lease_s is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._greeting.lease_s)))
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Fail the open calls when a task has failed, because no event would end them."""
        if not task.cancelled() and (error := task.exception()):
            self.fail(f"the engine client failed with {type(error).__name__}: {error}")

    def _secure(self, keys: Keys) -> None:
        self._socket.curve_secretkey = keys.secret
        self._socket.curve_publickey = keys.public
        self._socket.curve_serverkey = keys.peer
        # Heartbeats are needed, because no socket reports a machine that has lost its power.
        milliseconds = round(1000 * (self._greeting.lease_s or LEASE_S))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds // _RENEWALS)
        for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
            self._socket.setsockopt(option, milliseconds)

    def send(self, command: Command) -> None:
        if self.death is None:
            # The command is sent at once, or queued by ZeroMQ until the host is there, so there is nothing to await.
            self._socket.send(encode(command))

    def _drop_unsent(self) -> None:
        """Drop unsent messages, because no host is left to receive them, and `close` would wait for one."""
        self._socket.setsockopt(zmq.LINGER, 0)

    async def _receive(self) -> None:
        while True:
            try:
                self._handle(decode_event(await self._socket.recv()))
            except VersionError as error:
                self.fail(str(error))

    async def _renew(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / _RENEWALS)
            self.send(KeepAlive())

    async def _watch(self) -> None:
        """Wait until the connection is lost or refused, and fail.

        The operating system closes the socket of a killed host, which is detected sooner than missing heartbeats.
        """
        event = parse_monitor_message(await self._monitor.recv_multipart())
        if event["event"] == zmq.EVENT_DISCONNECTED or (self._keys is None and self._address.startswith("ipc://")):
            self.fail("the engine host went away")
        else:
            ours = (
                "does not accept this front end's keys" if self._keys else "asks for keys, and this front end has none"
            )
            self.fail(f"the engine host at {self._address} {ours}")
        self._drop_unsent()
        self._socket.disconnect(self._address)  # a later host at the same address does not know this client's calls
