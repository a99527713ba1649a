"""The runtime's end of the zygotes: start the site's, ask it for a function's, ask that one for isolates, hear of deaths.

What a function's zygote says is not believed: it has run an author's imports. A pidfd from it counts only when it names a child of its own. When
the runtime dies the sockets close, and every process here ends with them.
"""

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.functions.confine import Confinement
from runtime.functions.orders import MAX_MESSAGE_BYTES, Boot, Born, Died, Failed, Fork, Hatch, Order, reports
from runtime.functions.priority import Standing, cpu_s, tell_kernel

ROOT = Path(__file__).parents[2]
SDK = Path(__file__).parent / "sdk"
AGAIN_S = 0.002
COPIED_MIB = 3  # of the pages that a zygote shares with the site's, what it has written to
SETTLE_S = 10.0  # for a process to be born


class ZygoteError(Exception):
    """A process cannot be made; the message says why."""


class Child:
    """A process that a zygote made. `died` is set with its end."""

    def __init__(self) -> None:
        self.pidfd = -1
        self.pid = 0  # as this process sees it
        self.died: asyncio.Future[Died | None] = asyncio.get_running_loop().create_future()
        self.born: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def signal(self, number: int) -> None:
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stand(self, standing: Standing) -> None:
        if self.pid > 0:  # 0, one that was never born, would be this process
            tell_kernel(self.pid, standing)

    def cpu_s(self) -> float:
        """Used so far."""
        try:
            return cpu_s(self.pid) if self.pidfd >= 0 else 0.0
        except OSError:
            return 0.0

    def memory_mib(self) -> int:
        return memory_mib(self.pid)

    def over(self, report: Died | None) -> None:
        if not self.died.done():
            self.died.set_result(report)
        if not self.born.done():
            self.born.set_exception(ZygoteError("it ended before it was there"))
            self.born.exception()  # perhaps nobody asks
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Link:
    """One zygote's socket."""

    def __init__(self, control: socket.socket, parent_pid: Callable[[], int], on_failed: Callable[[str], None]) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._on_failed = on_failed
        self._children: dict[int, Child] = {}
        self._next_id = 0
        self.closed = False
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._read)

    def ask(self, order: Callable[[int], Order], fds: list[int]) -> Child:
        """Returns before the process is there: what is written to its sockets waits for it."""
        if self.closed:
            raise ZygoteError("the zygote is gone")
        self._next_id += 1
        data = msgspec.msgpack.encode(order(self._next_id))
        if len(data) > MAX_MESSAGE_BYTES:
            raise ZygoteError(f"vars and options of bindings have {len(data)} bytes, of at most {MAX_MESSAGE_BYTES}")
        try:
            socket.send_fds(self._control, [data], fds)
        except OSError as error:
            self.close()
            raise ZygoteError(f"the zygote takes no orders: {error.strerror}") from None
        child = self._children[self._next_id] = Child()
        return child

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        for child in self._children.values():
            child.kill()
            child.over(None)
        self._children.clear()

    def _read(self) -> None:
        while not self.closed:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            try:
                if not data:
                    return self.close()
                self._hear(data, fds)
            except (msgspec.ValidationError, msgspec.DecodeError):
                return self.close()
            finally:
                for fd in fds:
                    os.close(fd)

    def _hear_again(self, data: bytes, fd: int) -> None:
        fds = [fd]
        if not self.closed:
            self._hear(data, fds)
        for left in fds:
            os.close(left)

    def _hear(self, data: bytes, fds: list[int]) -> None:
        """Takes the descriptor that it keeps out of `fds`."""
        report = reports.decode(data)
        if isinstance(report, Failed) and report.id < 0:
            self._on_failed(report.why)
            return
        child = self._children.get(report.id)
        if child is None:
            return
        if isinstance(report, Born) and child.pidfd < 0 and fds:
            if not self._parent_pid():  # its own birth is still to be read, from another socket
                asyncio.get_running_loop().call_later(AGAIN_S, self._hear_again, data, fds.pop(0))
                return
            pid = _pid_of(fds[0])
            if _parent_of(pid) not in (self._parent_pid(), None):
                return  # a lie
            child.pidfd, child.pid = fds.pop(0), pid
            if not child.born.done():
                child.born.set_result(None)
        elif isinstance(report, Failed):
            del self._children[report.id]
            if not child.born.done():
                child.born.set_exception(ZygoteError(report.why))
                child.born.exception()
            child.over(None)
        elif isinstance(report, Died):
            del self._children[report.id]
            child.over(report)


class FunctionZygote:
    """One version of a function, confined, waiting to be forked."""

    def __init__(self, child: Child, control: socket.socket, shared_mib: Callable[[], int] = lambda: 0) -> None:
        """`shared_mib`: of what counts as its memory, what it has from the process that it was forked from."""
        self._child = child
        self._shared_mib = shared_mib
        self.why_failed = ""
        self._standing = Standing.USUAL
        self._link = Link(control, lambda: child.pid, self.fail)

    @property
    def is_alive(self) -> bool:
        return not self._link.closed and not self.why_failed and not self._child.died.done()

    @property
    def memory_mib(self) -> int:
        """That ending it would free."""
        if (all_mib := self._child.memory_mib()) == 0 or (shared_mib := self._shared_mib()) == 0:
            return all_mib
        return max(0, all_mib - shared_mib) + COPIED_MIB

    async def born(self) -> None:
        """Raises ZygoteError."""
        await asyncio.shield(self._child.born)

    def fork(self, boot: Boot, fds: list[int]) -> Child:
        return self._link.ask(lambda id: Fork(id, boot), fds)

    def stand(self, standing: Standing) -> None:
        """Its children are born with it."""
        if standing is not self._standing and self._child.pid > 0:
            self._standing = standing
            self._child.stand(standing)

    @property
    def is_closed(self) -> bool:
        return self._link.closed

    def close(self) -> None:
        self._link.close()
        self._child.kill()

    def fail(self, why: str) -> None:
        self.why_failed = self.why_failed or why


class Hatchery(Protocol):
    """Where functions' zygotes come from."""

    def hatch(self, limits: Confinement, imports: list[str], sys_path: list[str], log_fd: int) -> FunctionZygote: ...


async def try_tier(hatchery: Hatchery, limits: Confinement) -> str:
    """Why the machine does not offer a tier; empty where it does."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        made = hatchery.hatch(limits, [], [], nowhere)
    except ZygoteError as error:
        return str(error)
    finally:
        os.close(nowhere)
    try:
        async with asyncio.timeout(SETTLE_S):
            await made.born()
            probe = made.fork(Boot("", [], []), [])  # it cannot run without descriptors: that it is born is enough
            await asyncio.wait({probe.born})
            return made.why_failed or ("" if probe.born.exception() is None else str(probe.born.exception()))
    except (TimeoutError, ZygoteError) as error:
        return made.why_failed or str(error) or "it takes too long"
    finally:
        made.close()


class SiteZygote:
    """The one from which all others come."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._memory_mib = 0

    def start(self) -> None:
        """The process imports what functions need, for a fraction of a second; orders wait for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = importlib.util.find_spec("msgspec")
        assert spec is not None
        assert spec.origin is not None
        paths = [str(SDK), str(ROOT), str(Path(spec.origin).parents[1])]
        script = (
            f"import sys; sys.path += {paths!r}; from runtime.functions.zygote import main; main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", script],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "TZ": os.environ.get("TZ", "UTC")},
                start_new_session=True,
            )
        process = self._process
        self._link = Link(ours, lambda: process.pid, lambda why: None)

    def hatch(self, limits: Confinement, imports: list[str], sys_path: list[str], log_fd: int) -> FunctionZygote:
        if self._link is None or self._link.closed:
            self.stop()
            self.start()
        assert self._link is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = self._link.ask(lambda id: Hatch(id, limits, imports, sys_path), [theirs.fileno(), log_fd])
        return FunctionZygote(child, ours, self._settled_mib)

    def _settled_mib(self) -> int:
        """Asked only once a child of it is there, and then it has imported all that it will."""
        if self._memory_mib == 0 and self._process is not None:
            self._memory_mib = memory_mib(self._process.pid)
        return self._memory_mib

    def stop(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def memory_mib(pid: int) -> int:
    """Of a process; 0 where it is gone."""
    try:
        status = _read_at_once(f"/proc/{pid}/status")
    except OSError:
        return 0
    return sum(int(size) for size in _OWN_MEMORY.findall(status)) >> 10


_OWN_MEMORY = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)  # mapped files are the machine's cache


def _read_at_once(path: str) -> bytes:
    """Of /proc: 30 us, which is a quarter of what a Path takes, while every request waits."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 14)
    finally:
        os.close(file)


def _pid_of(pidfd: int) -> int:
    """As /proc here numbers it; 0 for what is no pidfd of a process that can be seen."""
    try:
        lines = _read_at_once(f"/proc/self/fdinfo/{pidfd}").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Pid:")), 0)


def _parent_of(pid: int) -> int | None:
    """None for one that has ended by now."""
    if pid <= 0:
        return None if pid == -1 else 0
    try:
        return int(_read_at_once(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except OSError:
        return None
