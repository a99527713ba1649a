"""TCP between simulated processes: streams of bytes with latency, windows, half-closes and resets, over links that can be cut and slowed.

A cut link loses no bytes: they arrive when the link is restored, as if TCP had sent them again. Until then neither end notices. A suspended process
still accepts connections and up to a window of bytes, as its kernel would. A killed process resets its connections.
"""

import asyncio
import errno
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple, cast

from tests.simulation.virtual_time import PROCESS, Process, VirtualLoop

WINDOW_BYTES = 64 << 10  # receive window
HIGH_BYTES = 64 << 10  # high-water mark of a transport's send buffer
SYN_AGAIN_S = 1.0
LOCAL_S = 0.0001  # latency between processes of one machine

Address = tuple[str, int]
Factory = Callable[[], asyncio.BaseProtocol]


class Link:
    """A link between two machines, with the same latency in both directions."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.is_cut = False
        self.ends: dict[VirtualTransport, None] = {}


class _Listening(NamedTuple):
    factory: Factory
    process: Process
    context: Context


class Listener:
    """A bound address, used in place of a listening socket."""

    family = socket.AF_INET

    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address

    def close(self) -> None:
        """Do nothing: the server's `close` ends listening."""


class _Server:
    def __init__(self, network: "Network", address: Address) -> None:
        self._network, self._address = network, address
        self._listening = network.listening[address]

    def close(self) -> None:
        if self._network.listening.get(self._address) is self._listening:  # otherwise a newer server has the address
            del self._network.listening[self._address]

    async def wait_closed(self) -> None:
        """Return at once: `close` leaves nothing to wait for."""


class Network(VirtualLoop):
    """The event loop with its network: `create_connection` connects to servers of `create_server`."""

    def __init__(self, on_delivery: Callable[[str], None] = lambda line: None) -> None:
        super().__init__()
        self.on_delivery = on_delivery
        self.listening: dict[Address, _Listening] = {}
        self._links: dict[frozenset[str], Link] = {}
        self._ends: defaultdict[Process, dict[VirtualTransport, None]] = defaultdict(dict)
        self._connected: dict[socket.socket, Address] = {}
        self._last_port = 40_000

    def link(self, one: str, other: str) -> Link:
        return self._links.setdefault(frozenset((one, other)), Link(LOCAL_S))

    def cut(self, link: Link) -> None:
        link.is_cut = True

    def mend(self, link: Link) -> None:
        link.is_cut = False
        for end in tuple(link.ends):
            end.pump()

    def open_ends(self, process: Process) -> "list[VirtualTransport]":
        """Return the connection ends of a process."""
        return list(self._ends[process])

    def kill(self, process: Process) -> None:
        for address in [address for address, one in self.listening.items() if one.process is process]:
            del self.listening[address]
        for end in self.open_ends(process):
            end.reset()
        super().kill(process)

    def forget(self, end: "VirtualTransport") -> None:
        self._ends[end.process].pop(end, None)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **options: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        assert sock is not None
        address = sock.getsockname()
        self.listening[address] = _Listening(protocol_factory, process, copy_context())
        return _Server(self, address)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Note the address for a library that connects its own socket; `create_connection` does the rest."""
        self._connected[sock] = address

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> Any:
        if sock is not None:
            host, port = self._connected.pop(sock)
            sock.close()
        process = PROCESS.get()
        assert process is not None
        link = self.link(process.host, host)
        await asyncio.sleep(2 * link.latency_s)
        while link.is_cut:
            await asyncio.sleep(SYN_AGAIN_S)
        listening = self.listening.get((host, port))
        if listening is None or process.state == "dead":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._last_port += 1
        here = (process.host, self._last_port)
        near = VirtualTransport(self, link, process, copy_context(), here, (host, port))
        far = VirtualTransport(self, link, listening.process, listening.context.copy(), (host, port), here)
        near.peer, far.peer = far, near
        for end in (near, far):
            self._ends[end.process][end] = None
            link.ends[end] = None
        self.call_soon(far.accept, listening.factory, context=far.context)
        protocol = protocol_factory()
        near.begin(protocol)
        return near, protocol


class _Arrival(NamedTuple):
    at: float
    data: bytes | None  # None at the end of the stream


class VirtualTransport(asyncio.Transport):
    """One end of a simulated connection."""

    peer: "VirtualTransport"

    def __init__(
        self, network: Network, link: Link, process: Process, context: Context, local: Address, remote: Address
    ) -> None:
        super().__init__({"sockname": local, "peername": remote})
        self.process = process
        self.context = context
        self._network, self._link = network, link
        self._protocol: asyncio.BaseProtocol | None = None
        self._arrived: deque[_Arrival] = deque()
        self.arrived_bytes = 0
        self._is_delivering = False
        self._pumped_at = 0.0  # when `_deliver` is scheduled next
        self.is_reset = False  # the other side reset the connection, which overtakes unread bytes
        self._is_reading = True
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4
        self._is_full = False
        self._is_closing = False
        self._has_ended = False  # this side writes no more
        self.is_lost = False

    # The functions below are called by the network.

    def accept(self, factory: Factory) -> None:
        if not self.is_lost:
            self.begin(factory())

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self.pump()

    def reset(self) -> None:
        """Reset the connection, as the kernel does for a killed process."""
        if not self.is_lost:
            self._is_closing = True
            self._unsent.clear()
            self._tell_reset()
            self._lose(None)

    def pump(self) -> None:
        """Schedule the delivery of the next bytes, unless the protocol does not read."""
        if self.is_lost or self._is_delivering or self._link.is_cut or self._protocol is None:
            return
        if not self.is_reset:
            if not self._arrived or not self._is_reading:
                return
            at = self._arrived[0].at
            if at > self._network.now:
                if self._pumped_at != at:
                    self._pumped_at = at
                    self._network.call_at(at, self._deliver, context=self.context)
                return
        self._is_delivering = True
        self._network.call_soon(self._deliver, context=self.context)

    def _deliver(self) -> None:
        self._is_delivering = False
        if self.is_lost or self._link.is_cut:
            return
        if self.is_reset:
            self._is_closing = True
            return self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        if not self._is_reading or not self._arrived or self._is_closing:
            return
        if self._arrived[0].at > self._network.now:  # the bytes of this call were delivered by an earlier one
            return self.pump()
        _, data = self._arrived.popleft()
        if data is None:
            assert isinstance(self._protocol, asyncio.Protocol | asyncio.BufferedProtocol)
            if not self._protocol.eof_received():
                self.close()
        else:
            self.arrived_bytes -= len(data)
            self._network.on_delivery(f"{self._network.now:.6f} {self.process.name} {len(data)}")
            self.peer.flush()
            self._feed(data)
        self.pump()

    def _feed(self, data: bytes) -> None:
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            while data:
                buffer = memoryview(cast(bytearray, protocol.get_buffer(len(data))))
                size = min(len(buffer), len(data))
                buffer[:size], data = data[:size], data[size:]
                protocol.buffer_updated(size)
        else:
            cast(asyncio.Protocol, protocol).data_received(data)

    def take(self, data: bytes | None) -> None:
        """Receive bytes of the other side, or None at their end; they arrive after the link's latency."""
        if self.is_lost or self._is_closing:
            if data is not None:
                self._tell_reset()
            return
        self._arrived.append(_Arrival(self._network.now + self._link.latency_s, data))
        self.arrived_bytes += len(data or b"")
        self.pump()

    def flush(self) -> None:
        """Send as much as the other side's window allows."""
        peer = self.peer
        while self._unsent and (peer.is_lost or peer.arrived_bytes < WINDOW_BYTES):
            part = self._unsent.popleft()
            self._unsent_bytes -= len(part)
            if self.process.state != "dead":
                peer.take(part)
        if self._is_full and self._unsent_bytes <= self._low:
            self._is_full = False
            self._network.call_soon(self._resume_writing, context=self.context)
        if self._has_ended and not self._unsent:
            self._has_ended = False
            peer.take(None)
        if self._is_closing and not self._unsent:
            self._network.call_soon(self._lose, None, context=self.context)

    def _resume_writing(self) -> None:
        if not self.is_lost and self._protocol is not None:
            self._protocol.resume_writing()

    def _tell_reset(self) -> None:
        network, peer = self._network, self.peer

        def arrive() -> None:
            peer.is_reset = True
            peer.pump()

        network.call_later(self._link.latency_s, arrive, context=Context())

    def _lose(self, error: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._link.ends.pop(self, None)
        self._network.forget(self)
        if self.arrived_bytes:  # closing with unread bytes resets the connection
            self._tell_reset()
        if self._protocol is not None:
            self._network.call_soon(self._protocol.connection_lost, error, context=self.context)

    # The functions below are called by the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self.is_lost or not data:
            return
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(data)
        self.flush()
        if self._unsent_bytes > self._high and not self._is_full and self._protocol is not None:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(cast(Sequence[bytes], list_of_data)))

    def write_eof(self) -> None:
        self._has_ended = True
        self.flush()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = self._has_ended = True
            self.flush()

    def abort(self) -> None:
        if self.is_lost:
            return
        self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._tell_reset()
        self._network.call_soon(self._lose, None, context=self.context)

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.pump()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol
