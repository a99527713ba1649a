"""TCP connections for a process that may not open sockets: the runtime opens them and passes them on.

The runtime applies its egress policy. Here `socket.socket` is replaced by a class whose `connect` asks the runtime, which also resolves names. So
everything that is built on Python's sockets works: `ssl`, asyncio, requests, urllib3, httpx, aiohttp, database drivers. Import this before `ssl` and
asyncio, whose classes derive from `socket.socket`. This module is independent of functions.
"""

import _socket
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

ANSWER_S = 30.0  # longest wait for the runtime to resolve and connect; the runtime's own time limits are shorter
MAX_NAMES = 1024  # addresses whose names are remembered
_System = socket.socket
_getaddrinfo = socket.getaddrinfo
_names: dict[str, str] = {}  # names by resolved address; to connect, the runtime gets the name and resolves it again
_broker: socket.socket | None = None
_within: Callable[[], int] = int  # returns the id of the request being handled; set by `use`


class SocketQuestion(msgspec.Struct, frozen=True):
    """A request to the runtime; a socket for the reply is passed along."""

    host: str
    port: int
    within: int = -1  # id of the request that opens the connection
    connects: bool = True  # false to only resolve the name


class SocketAnswer(msgspec.Struct, frozen=True):
    """The runtime's reply; the connected socket, if any, is passed along."""

    error: str = ""
    errno: int = 0
    addresses: list[str] = []


class BrokeredSocket(_System):
    """A TCP socket that the runtime connects.
    Sockets of other families, and sockets made from a descriptor, behave as Python's own; UDP and raw sockets raise PermissionError."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        self._is_brokered = fileno is None and _broker is not None and family in (-1, socket.AF_INET, socket.AF_INET6)
        self._is_connected = False
        if self._is_brokered:
            kind = socket.SOCK_STREAM if type == -1 else type & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if kind != socket.SOCK_STREAM:
                raise PermissionError(errno.EPERM, "functions open TCP connections only: no datagrams, no raw sockets")
            family, type, fileno = (socket.AF_INET if family == -1 else family), socket.SOCK_STREAM, _placeholder()
        super().__init__(family, type, proto, fileno)

    @property
    def awaits_connection(self) -> bool:
        return self._is_brokered and not self._is_connected

    def connect(self, address: Any) -> None:
        if not self.awaits_connection:
            return super().connect(address)
        timeout = self.gettimeout()
        answer, fd = _asked(str(address[0]), int(address[1]), timeout if timeout else ANSWER_S, connects=True)
        if fd is None:
            raise _error(answer, address)
        try:
            os.dup2(fd, self.fileno(), inheritable=False)
        finally:
            os.close(fd)
        os.set_blocking(self.fileno(), timeout is None)
        self._is_connected = True

    def connect_ex(self, address: Any) -> int:
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or errno.ECONNREFUSED
        return 0

    def setsockopt(self, *arguments: Any) -> None:
        """Ignore options of a brokered socket, which the runtime sets itself."""
        if not self._is_brokered:
            super().setsockopt(*arguments)

    def bind(self, address: Any) -> None:
        if self._is_brokered:
            raise PermissionError(errno.EPERM, "functions cannot listen, nor choose the address that they connect from")
        super().bind(address)

    def getsockname(self) -> Any:
        return ("0.0.0.0", 0) if self.awaits_connection else super().getsockname()


def getaddrinfo(
    host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
) -> list[tuple[Any, ...]]:
    """Resolve a name through the runtime; same parameters and result as `socket.getaddrinfo`."""
    text = host.decode() if isinstance(host, bytes) else host
    if _broker is None or text is None or _is_address(text):
        return _getaddrinfo(host, port, family, type or socket.SOCK_STREAM, proto, flags | socket.AI_NUMERICHOST)
    number = socket.getservbyname(port) if isinstance(port, str) and not port.isdigit() else int(port or 0)
    answer, _ = _asked(text, number, ANSWER_S, connects=False)
    if answer.error:
        raise socket.gaierror(socket.EAI_NONAME, answer.error)
    found: list[tuple[Any, ...]] = []
    for address in answer.addresses:
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        if family in (0, kind):
            _names[address] = text
            place = (address, number, 0, 0) if kind == socket.AF_INET6 else (address, number)
            found.append(
                (kind, socket.SOCK_STREAM, socket.IPPROTO_TCP, text if flags & socket.AI_CANONNAME else "", place)
            )
    while len(_names) > MAX_NAMES:
        del _names[next(iter(_names))]
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, f"{text} has no address of this family")
    return found


def gethostbyname(host: str) -> str:
    return str(getaddrinfo(host, 0, socket.AF_INET)[0][4][0])


def install() -> None:
    """Replace the functions that create sockets. They behave as before until `use` is called."""
    socket.socket = BrokeredSocket  # type: ignore[misc]
    socket.getaddrinfo = getaddrinfo
    socket.gethostbyname = gethostbyname


def install_in_asyncio() -> None:
    """Let event loops connect without blocking: a thread asks the runtime."""
    from asyncio.selector_events import BaseSelectorEventLoop

    connect = BaseSelectorEventLoop.sock_connect

    async def sock_connect(self: Any, sock: Any, address: Any) -> None:
        if not (isinstance(sock, BrokeredSocket) and sock.awaits_connection):
            return await connect(self, sock, address)
        await self.run_in_executor(None, sock.connect, address)

    BaseSelectorEventLoop.sock_connect = sock_connect  # type: ignore[method-assign]


def use(fd: int, within: Callable[[], int]) -> None:
    """Send requests to the runtime over the socket `fd`.
    `within` returns the id of the request that the function is handling."""
    global _broker, _within
    _broker, _within = _System(fileno=fd), within


def _placeholder() -> int:
    """Return a descriptor whose number the connection will get."""
    one, other = _socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other.close()
    return one.detach()


def _asked(host: str, port: int, timeout_s: float, *, connects: bool) -> tuple[SocketAnswer, int | None]:
    """Send a request to the runtime; return its reply and the connection, if any. Raises OSError."""
    assert _broker is not None
    question = SocketQuestion(_names.get(host, host), port, _within(), connects)
    ours, theirs = (_System(fileno=each.detach()) for each in _socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    with ours, theirs:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", theirs.fileno()))]
        _broker.sendmsg([msgspec.msgpack.encode(question)], rights)
        theirs.close()
        ours.settimeout(min(timeout_s, ANSWER_S))
        data, fds, _, _ = socket.recv_fds(ours, 64 << 10, 1)
    if not data:
        raise ConnectionError(errno.ECONNABORTED, "the runtime did not answer")
    return msgspec.msgpack.decode(data, type=SocketAnswer), (fds[0] if fds else None)


def _error(answer: SocketAnswer, address: Any) -> OSError:
    sentence = answer.error or f"{address[0]}:{address[1]} cannot be reached"
    if answer.errno == errno.ETIMEDOUT:
        return TimeoutError(errno.ETIMEDOUT, sentence)
    return OSError(answer.errno or errno.ECONNREFUSED, sentence)


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text.partition("%")[0])
        except (OSError, ValueError):
            continue
        return True
    return False
