"""One isolate as a process: forked from its zygote, measured, signalled, and killed.

A signal makes it write a stack trace; its exit status explains its end.
"""

import asyncio
import os
import signal
import socket
from contextlib import ExitStack, suppress

from pilotlight.functions.host.faults import Fault, authors_frames, manner_of
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.sandbox import processes
from pilotlight.functions.sandbox.priority import CpuHistory, PriorityClass
from pilotlight.functions.sandbox.zygotes.control_messages import Boot, Died
from pilotlight.functions.sandbox.zygotes.zygote_client import ChildProcess, FunctionZygote

TRACE_WAIT_S = 0.5
TRACE_QUIET_S = 0.1  # a trace is complete after this time without a further part
MAX_TRACE = 8192
EXIT_REPORT_S = 1.0  # time to wait for the report of an exit


class IsolateProcess:
    def __init__(self, function: str, log: FunctionLog, history: CpuHistory) -> None:
        self.function = function
        self.log = log
        self.history = history
        self.child: ChildProcess | None = None
        self._priority = PriorityClass.NORMAL  # the priority that was set last
        self._zygote: FunctionZygote | None = None
        self._trace_fd = -1

    def start(self, zygote: FunctionZygote, boot: Boot) -> tuple[socket.socket, socket.socket]:
        """Request the fork; return our ends of the isolate's channel and of its broker socket.
        Raises ZygoteError and OSError."""
        self._zygote = zygote
        with ExitStack() as childs_ends, ExitStack() as on_failure:
            childs_ends.callback(self.log.close_write_end)
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            childs_ends.callback(theirs.close)
            asked, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(asked.close)
            childs_ends.callback(asks.close)
            self._trace_fd, trace = os.pipe()
            childs_ends.callback(os.close, trace)
            os.set_blocking(self._trace_fd, False)
            os.set_blocking(trace, False)
            self.child = zygote.fork(boot, [theirs.fileno(), self.log.write_fd, trace, asks.fileno()])
            on_failure.pop_all()
        self.child.started.add_done_callback(lambda _: self.update_priority())
        return ours, asked

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.pidfd >= 0

    @property
    def is_deprioritized(self) -> bool:
        return self._priority is PriorityClass.BACKGROUND

    def update_priority(self) -> None:
        priority = self.history.priority_class
        if priority is not self._priority and self.child is not None:
            self._priority = priority
            self.child.set_priority(priority)

    def cpu_s(self) -> float:
        return 0.0 if self.child is None else self.child.cpu_s()

    def memory_mib(self) -> int:
        return 0 if self.child is None else self.child.memory_mib()

    @property
    def is_stopped(self) -> bool:
        return self.child is not None and processes.is_stopped(self.child.pid)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    async def stack(self) -> str:
        """Return a stack trace of the author's frames, most recent call first.
        faulthandler writes it when the process gets a signal."""
        assert self.child is not None
        self.child.signal(signal.SIGUSR1)
        text, loop = b"", asyncio.get_running_loop()
        ends_at = loop.time() + TRACE_WAIT_S
        while loop.time() < ends_at and len(text) < MAX_TRACE:
            await asyncio.sleep(0.01)
            try:
                more = os.read(self._trace_fd, MAX_TRACE)
            except BlockingIOError:
                continue
            if not more:
                break
            text += more
            ends_at = min(ends_at, loop.time() + TRACE_QUIET_S)
        return authors_frames(text.decode("utf-8", "replace"))

    async def crash_fault(self, broke: str, *, was_ready: bool) -> Fault:
        """Return why the process ended by itself.
        `broke` describes a protocol violation, for which it is killed here; empty if there was none."""
        assert self.child is not None
        report: Died | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_REPORT_S):
                if broke:
                    self.child.kill()
                report = await asyncio.shield(self.child.died)
        sentence = f"the function {self.function!r} {broke or manner_of(report)}"
        if report is None and self.child.started.done() and (why := self.child.started.exception()) is not None:
            sentence = f"the function {self.function!r} cannot be started: {why}"
        if self._zygote is not None and self._zygote.why_failed:
            how = "was ended" if was_ready else "cannot be started"
            sentence = f"the function {self.function!r} {how}: {self._zygote.why_failed}"
        last = "\n".join(self.log.last())
        return Fault(sentence, code="crashed", name="Crashed", detail=f"{sentence}\n{last}".rstrip())

    async def close(self, patience_s: float) -> None:
        """Kill the process if it does not end by itself within `patience_s`."""
        if self.child is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.shield(self.child.died)
            self.child.kill()
        self.log.close()
        if self._trace_fd >= 0:
            os.close(self._trace_fd)
            self._trace_fd = -1
