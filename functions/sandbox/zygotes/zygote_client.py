"""The runtime's end of a zygote: requests processes and receives reports of their starts and exits.

site_zygote.py starts the site's own zygote. A function's zygote is not trusted, because it has run the author's imports. Its report of a start counts
only if the pidfd is a new child of that zygote, its report of an exit only if the process has exited; a zygote that reports anything else is ended.
From tier 2 on a zygote must ask for each fork, and is allowed one for each command. When the runtime dies, the sockets close and all these processes
end.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from pilotlight.functions.sandbox.confinement import system
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import PriorityClass, apply_priority, cpu_s
from pilotlight.functions.sandbox.processes import descendants, has_ended, memory_mib, parent_of, pid_of
from pilotlight.functions.sandbox.zygotes.control_messages import (
    MAX_MESSAGE_BYTES,
    Boot,
    Command,
    Confined,
    Died,
    Failed,
    ForkIsolate,
    Imported,
    Started,
    report_decoder,
)
from pilotlight.support.time_limits import NO_PAUSES, Pauses

AGAIN_S = 0.002
COPIED_MIB = 3  # shared pages that a zygote has copied by writing to them
FORK_TIMEOUT_S = 10.0  # time limit for a process to start
FORK_CPU_S = 0.05  # CPU time allowed to a zygote for a fork and the report of an exit; measured: 0.01
BESIDE_SHARE = 0.01  # share of a core allowed to threads that packages start
LOOK_S = 0.5  # pause between two checks of a zygote
SELDOM_S = 5.0  # pause between two checks of an idle function's zygote, because there may be thousands
MAX_DENIED = 64  # refused forks after which the zygote is ended; some packages try a few during import
READ_AT_ONCE = 64  # messages handled before the event loop continues
FORGED = "its packages forged reports of its zygote"


class ZygoteError(Exception):
    """A process cannot be started; the message has the reason."""


class ProtocolViolation(Exception):
    """A zygote reported something impossible."""


class ChildProcess:
    """A process that a zygote forked. `died` is set when it has exited."""

    def __init__(self) -> None:
        self.pidfd = -1
        self.pid = 0  # in the runtime's pid namespace; 0 until it has started
        self.died: asyncio.Future[Died | None] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def signal(self, number: int) -> None:
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def set_priority(self, priority_class: PriorityClass) -> None:
        if self.pid > 0:  # pid 0 would set this process's own priority
            apply_priority(self.pid, priority_class)

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        try:
            return cpu_s(self.pid) if self.pidfd >= 0 else 0.0
        except OSError:
            return 0.0

    def memory_mib(self) -> int:
        return memory_mib(self.pid)

    def ended(self, report: Died | None) -> None:
        if not self.died.done():
            self.died.set_result(report)
        if not self.started.done():
            self.started.set_exception(ZygoteError("it ended before it had started"))
            self.started.exception()  # marks the exception as retrieved
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class ZygoteConnection:
    """The runtime's end of one zygote's control socket."""

    def __init__(self, control: socket.socket, parent_pid: Callable[[], int], on_failed: Callable[[str], None]) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._on_failed = on_failed
        self._children: dict[int, ChildProcess] = {}
        self._unverified: set[int] = set()  # children whose start is checked again once the zygote's own pid is known
        self._next_id = 0
        self.num_settled = 0  # commands with a started or failed child
        self.num_forks = 0  # forks that were allowed
        self._listener = -1  # listener for the zygote's fork requests
        self._num_denied = 0
        self.is_confined = self.is_imported = False
        self.closed = False
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._read)

    def ask(self, command: Callable[[int], Command], fds: list[int]) -> ChildProcess:
        """Request a process and return at once; data sent to its sockets waits until it runs.

        Raises ZygoteError.
        """
        if self.closed:
            raise ZygoteError("the zygote is gone")
        self._next_id += 1
        data = msgspec.msgpack.encode(command(self._next_id))
        if len(data) > MAX_MESSAGE_BYTES:
            raise ZygoteError(f"vars and options of bindings have {len(data)} bytes, of at most {MAX_MESSAGE_BYTES}")
        try:
            socket.send_fds(self._control, [data], fds)
        except OSError as error:
            self.close()
            raise ZygoteError(f"the zygote does not accept commands: {error.strerror}") from None
        child = self._children[self._next_id] = ChildProcess()
        return child

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._listener >= 0:
            loop.remove_reader(self._listener)
            os.close(self._listener)
            self._listener = -1
        for child in self._children.values():
            child.kill()
            child.ended(None)
        self._children.clear()

    @property
    def is_guarded(self) -> bool:
        """Tell whether the zygote must ask for each fork."""
        return self._listener >= 0

    @property
    def is_settled(self) -> bool:
        """Tell whether all commands have a result."""
        return self.num_settled == self._next_id

    @property
    def pids(self) -> set[int]:
        return {child.pid for child in self._children.values()}

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            if self.closed:
                return
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            try:
                if not data:
                    return self.close()
                self._handle_report(data, fds)
            except (msgspec.ValidationError, msgspec.DecodeError, ProtocolViolation):
                self._on_failed(FORGED)
                return self.close()
            finally:
                for fd in fds:
                    os.close(fd)

    def _handle_report(self, data: bytes, fds: list[int]) -> None:
        """Handle a report; remove a descriptor from `fds` to keep it open. Raises ProtocolViolation."""
        report = report_decoder.decode(data)
        if isinstance(report, Confined):
            if self.is_confined:
                raise ProtocolViolation
            self.is_confined = True
            if fds:
                self._listener = fds.pop(0)
                asyncio.get_running_loop().add_reader(self._listener, self._on_fork_request)
            return
        if isinstance(report, Imported):
            self.is_imported = True
            return
        if isinstance(report, Failed) and report.id < 0:
            self._on_failed(report.why)
            return
        child = self._children.get(report.id)
        if child is None or (not isinstance(report, Died) and (child.pidfd >= 0 or report.id in self._unverified)):
            raise ProtocolViolation
        if isinstance(report, Started):
            if not fds:
                raise ProtocolViolation
            self.num_settled += 1
            self._on_started(report.id, fds.pop(0))
        elif isinstance(report, Failed):
            self.num_settled += 1
            del self._children[report.id]
            if not child.started.done():
                child.started.set_exception(ZygoteError(report.why))
                child.started.exception()
            child.ended(None)
        else:
            if not (report.id in self._unverified if child.pidfd < 0 else has_ended(child.pidfd)):
                raise ProtocolViolation
            del self._children[report.id]
            child.ended(report)

    def _on_started(self, id: int, pidfd: int) -> None:
        """Record that a child has started. Raises ProtocolViolation."""
        self._unverified.discard(id)
        if self.closed or (child := self._children.get(id)) is None:  # the child has exited meanwhile
            os.close(pidfd)
        elif not self._parent_pid():
            # the start of this zygote itself is not reported yet: that report comes over another socket
            self._unverified.add(id)
            asyncio.get_running_loop().call_later(AGAIN_S, self._on_started_late, id, pidfd)
        else:
            pid = pid_of(pidfd)
            if parent_of(pid) not in (self._parent_pid(), None) or (pid > 0 and pid in self.pids):
                os.close(pidfd)
                raise ProtocolViolation
            child.pidfd, child.pid = pidfd, pid
            if not child.started.done():
                child.started.set_result(None)

    def _on_started_late(self, id: int, pidfd: int) -> None:
        try:
            self._on_started(id, pidfd)
        except ProtocolViolation:
            self._on_failed(FORGED)
            self.close()

    def _on_fork_request(self) -> None:
        """Answer the zygote's request to fork. After the imports, one fork is allowed for each command."""
        try:
            question = system.asked(self._listener)
        except OSError:
            return
        self._read()  # a report of the zygote's imports or last fork may be waiting
        if self.closed:
            return
        is_allowed = self.is_imported and self.num_forks <= self.num_settled < self._next_id
        if is_allowed:
            self.num_forks = self.num_settled + 1
        else:
            self._num_denied += 1
        system.answer(self._listener, question, is_allowed)
        if self._num_denied > MAX_DENIED:
            self._on_failed("its packages start processes again and again")
            self.close()


class FunctionZygote:
    """The zygote of one version of a function: confined, and forked for each isolate."""

    def __init__(
        self,
        child: ChildProcess,
        control: socket.socket,
        shared_mib: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        pauses: Pauses = NO_PAUSES,
    ) -> None:
        """`shared_mib` returns how much of its memory it shares with the zygote that it was forked from."""
        self._child = child
        self._shared_mib = shared_mib
        self._clock, self._pauses = clock, pauses
        self.why_failed = ""
        self._created_at = self._looked_at = self._settled_at = clock()
        self._imported_cpu_s: float | None = None  # CPU time that it had used when its imports ended
        self._priority = PriorityClass.NORMAL
        self._connection = ZygoteConnection(control, lambda: child.pid, self.fail)

    @property
    def pid(self) -> int:
        """Return the id of its process; 0 until it exists."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return not self._connection.closed and not self.why_failed and not self._child.died.done()

    @property
    def can_fork(self) -> bool:
        """Tell whether it has imported its packages and carried out all commands."""
        return self.is_alive and self._connection.is_imported and self._connection.is_settled

    @property
    def memory_mib(self) -> int:
        """The memory in MiB that the end of this zygote would free."""
        if (all_mib := self._child.memory_mib()) == 0 or (shared_mib := self._shared_mib()) == 0:
            return all_mib
        return max(0, all_mib - shared_mib) + COPIED_MIB

    async def started(self) -> None:
        """Wait until the process exists. Raises ZygoteError."""
        await asyncio.shield(self._child.started)

    def fork(self, boot: Boot, fds: list[int]) -> ChildProcess:
        return self._connection.ask(lambda id: ForkIsolate(id, boot), fds)

    def set_priority(self, priority_class: PriorityClass) -> None:
        """Set the zygote's priority, which its children inherit."""
        if priority_class is not self._priority and self.pid > 0:
            self._priority = priority_class
            self._child.set_priority(priority_class)

    def why_ended(self, limits: FunctionLimits, *, is_asleep: bool) -> str:
        """Return why the zygote must end, because its packages exceed the function's limits.
        Return "" if they do not, or if no check is due yet."""
        now = self._clock()
        self._pauses.check(now)
        if now - self._looked_at < (SELDOM_S if is_asleep else LOOK_S) or not self.is_alive or self.pid <= 0:
            return ""
        self._looked_at = now
        if self._connection.is_settled:
            self._settled_at = now
        cpu_s = (
            self._child.cpu_s() - FORK_CPU_S * self._connection.num_settled - BESIDE_SHARE * (now - self._created_at)
        )
        if not self._connection.is_imported:
            is_late = self._pauses.silent_s(self._created_at, now) > limits.start_s
            return f"its packages were not imported within {limits.start_s:g} s" if is_late else ""
        if self._imported_cpu_s is None:
            self._imported_cpu_s = cpu_s
        if cpu_s - self._imported_cpu_s > limits.cpu_ms / 1e3:
            return f"its packages used more than {limits.cpu_ms} ms of CPU time outside requests"
        if self._pauses.silent_s(self._settled_at, now) > limits.start_s:
            return f"its packages kept its isolates from starting for {limits.start_s:g} s"
        if (memory_mib := self._child.memory_mib()) > limits.memory_mib:
            return f"its packages used {memory_mib} MiB of memory, of at most {limits.memory_mib}"
        if (
            self._connection.is_settled
            and self._connection.is_guarded
            and descendants(self.pid) - self._connection.pids
        ):
            return "its packages started processes"
        return ""

    @property
    def is_closed(self) -> bool:
        return self._connection.closed

    def close(self) -> None:
        self._connection.close()
        self._child.kill()

    def fail(self, why: str) -> None:
        self.why_failed = self.why_failed or why


class ZygoteFactory(Protocol):
    """Creates zygotes of functions."""

    def create_zygote(self, limits: Confinement, imports: list[str], log_fd: int) -> FunctionZygote: ...


async def try_tier(factory: ZygoteFactory, limits: Confinement) -> str:
    """Test a tier; return why the machine does not support it, empty if it does."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        made = factory.create_zygote(limits, [], nowhere)
    except ZygoteError as error:
        return str(error)
    finally:
        os.close(nowhere)
    try:
        async with asyncio.timeout(FORK_TIMEOUT_S):
            await made.started()
            probe = made.fork(
                Boot("", [], []), []
            )  # without descriptors the isolate cannot run, but its start proves that forks work
            await asyncio.wait({probe.started})
            return made.why_failed or ("" if probe.started.exception() is None else str(probe.started.exception()))
    except (TimeoutError, ZygoteError) as error:
        return made.why_failed or str(error) or "it takes too long"
    finally:
        made.close()
