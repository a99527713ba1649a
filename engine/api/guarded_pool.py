"""Child processes that run jobs on untrusted bytes, with limits.

If such bytes make native code crash, hang or use too much memory, only a child process ends. A job is a call of a function of the project, with
arguments and result in JSON. A child runs one job at a time, within limits of CPU time and memory, and is replaced when it ends. This module is
independent of what a job computes and how long a caller waits.
"""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pilotlight.support.parent_death import die_with

EndReason = Literal[
    "crash",  # the child was ended by a signal that the job caused
    "memory",  # the job exceeded its memory limit
    "cpu",  # the job exceeded its limit of CPU time
    "deadline",  # the job got too little CPU time before its deadline
    "lost",  # the child ended before the job started, or was killed from outside
]
# Size of the stack on which a child runs jobs: half of a main thread's usual stack, so that nested data that does not overflow it is safe in other
# processes.
STACK_BYTES = 4 << 20
# Most wall time for the start and preparation of a child. Reading 150,000 tokens takes 1.5 s of CPU time, and minutes of wall time for
# a child of low priority on a busy machine. A child that is killed before its end starts again from nothing.
PREPARE_S = 600.0
SLACK = 4.0  # a job's deadline as a multiple of its CPU limit; a machine on which a job takes longer is overloaded
MAX_CALLS = 1000  # calls per child, which is then replaced, because libraries leak memory
MAX_KEPT_BYTES = 64 << 20  # memory that one call may leave allocated before the child is replaced
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # signals from outside; limits and crashes cause other signals
# Environment variables of children. Libraries start no threads, whose stacks and arenas would count as a job's memory; Rust's backtraces do not
# belong in a site's log.
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
_LENGTH = struct.Struct("<I")


class JobCall(NamedTuple):
    """A module-level function and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def named(self) -> list[Any]:
        return [self.function.__module__, self.function.__qualname__, self.arguments]


class GuardedJob(NamedTuple):
    call: JobCall
    cpu_s: float
    memory_bytes: int  # limit of the memory that the call may allocate in the child
    # A call that runs first, without the limits, for example to read and cache a trusted file.
    prepare: JobCall | None = None
    slack: float = SLACK

    @property
    def deadline_s(self) -> float:
        return self.slack * self.cpu_s + 1.0


class JobError(Exception):
    """A job's function raised an exception; `name` is the exception's class, the message its text."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class JobEndedError(Exception):
    """A job ended together with its child; the message gives the reason."""

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason: EndReason = reason

    @property
    def is_jobs_fault(self) -> bool:
        """True if the job is the cause, so that it would end another child, too."""
        return self.reason in ("crash", "memory", "cpu")


class GuardedPool:
    """A few children, each started when it is first needed. Jobs wait for a free child in order."""

    def __init__(self, size: int, niceness: int = 0) -> None:
        """Make the children without starting them.

        `niceness`: added to the niceness of this process. With 5 a child gets a third of this process's CPU share under contention, so no caller
        should have to wait for its jobs.
        """
        self._threads = ThreadPoolExecutor(size, "guarded")
        self._children = [_Child(niceness) for _ in range(size)]
        self._idle = deque(self._children)  # free children; the last one is taken next

    def submit(self, job: GuardedJob) -> "Future[Any]":
        """Queue a job, and return a future of its result, which may raise JobError or JobEndedError."""
        return self._threads.submit(self._run, job)

    def close(self) -> None:
        """End the children and their jobs."""
        for child in self._children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.end()

    def _run(self, job: GuardedJob) -> Any:
        child = self._idle.pop()  # never empty, because there are as many threads as children
        try:
            return child.run(job)
        finally:
            self._put_back(child)
            if not child.is_running:
                with suppress(RuntimeError):  # `close` was called meanwhile
                    self._threads.submit(self._restart, job.prepare)

    def _restart(self, prepare: JobCall | None) -> None:
        """Start and prepare a child that has ended, so that a later job need not wait for it."""
        child = self._idle.popleft()
        try:
            with suppress(JobError, JobEndedError):
                child.run(GuardedJob(JobCall(_nothing), 1.0, MAX_KEPT_BYTES, prepare))
        finally:
            self._put_back(child)

    def _put_back(self, child: "_Child") -> None:
        """Make a child free. One that has ended is the last to be taken, because other children answer sooner."""
        (self._idle.append if child.is_running else self._idle.appendleft)(child)


class _Child:
    """The parent's handle of one child process, which is started and replaced as needed."""

    def __init__(self, niceness: int) -> None:
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # guards the start and the end of the process

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def run(self, job: GuardedJob) -> Any:
        """Run a job in the child and return its result. Raises JobError, JobEndedError."""
        channel, has_started = self._start(), False
        prepare = None if job.prepare is None else job.prepare.named()
        try:
            _send(channel, [job.call.named(), prepare, job.cpu_s, job.memory_bytes])
            _receive(channel, PREPARE_S)
            has_started = True
            answer = _receive(channel, job.deadline_s)
        except (OSError, EOFError) as error:
            raise self._ended(job, has_started=has_started, is_late=isinstance(error, TimeoutError)) from None
        if answer["retires"]:
            self.end()
        if answer["is_memory"]:
            raise _over_memory(job)
        if answer["raised"] is not None:
            raise JobError(*answer["raised"])
        return answer["result"]

    def kill(self) -> None:
        """Kill the process with its job; no other process is started."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _start(self) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise JobEndedError("lost", "its process was closed")
            if self._channel is None:
                try:
                    self._process, self._channel = self._started()
                except OSError as error:  # too many files or processes, or too little memory: a later job tries again
                    raise JobEndedError("lost", f"its process could not be started: {error}") from None
            return self._channel

    def _started(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """Start the process; return it and the channel to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "pilotlight.engine.api.guarded_pool",
                str(theirs.fileno()),
                str(os.getpid()),
                str(self._niceness),
            ]
            environment = {**os.environ, **_ENVIRONMENT}
            no_file = subprocess.DEVNULL
            try:
                process = subprocess.Popen(
                    command,
                    stdin=no_file,
                    stdout=no_file,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    process_group=0,  # a terminal's signals reach only the parent
                )
            except BaseException:
                ours.close()
                raise
        return process, ours

    def end(self, *, is_ending: bool = False) -> int | None:
        """End the process, if there is one, and return its exit status.

        `is_ending`: the process has closed its socket, so wait for its own exit status first.
        """
        with self._lock:
            if self._process is None or self._channel is None:
                return None
            self._channel.close()
            with suppress(subprocess.TimeoutExpired):
                if is_ending:
                    self._process.wait(timeout=5.0)
            self._process.kill()
            status = self._process.wait()
            self._process = self._channel = None
            return status

    def _ended(self, job: GuardedJob, *, has_started: bool, is_late: bool) -> JobEndedError:
        """End the process, and return an error with the reason why its job ended."""
        status = self.end(is_ending=not is_late)
        if is_late and has_started:
            message = f"it got too little CPU time in {job.deadline_s:g} s: the machine is overloaded"
            return JobEndedError("deadline", message)
        if status is None or is_late or not has_started or status >= 0 or -status in _OUTSIDE:
            return JobEndedError("lost", f"its process ended too early (status {status})")
        if -status == signal.SIGPROF:
            return JobEndedError("cpu", f"it needs more than {job.cpu_s:g} s of CPU time")
        if -status == signal.SIGABRT:  # raised by Rust if an allocation fails
            message = f"it aborted its process, most likely by using more than {job.memory_bytes >> 20} MiB of memory (SIGABRT)"
            return JobEndedError("memory", message)
        return JobEndedError("crash", f"it crashed its process ({signal.Signals(-status).name})")


def _over_memory(job: GuardedJob) -> JobEndedError:
    return JobEndedError("memory", f"it needs more than {job.memory_bytes >> 20} MiB of memory")


def _send(channel: socket.socket, message: Any) -> None:
    text = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(text)) + text)


def _receive(channel: socket.socket, within_s: float | None = None) -> Any:
    """Receive one message. Raises TimeoutError, EOFError, OSError."""
    deadline = None if within_s is None else time.monotonic() + within_s
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    return json.loads(_read(channel, length, deadline))


def _read(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < length:
        channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
        piece = channel.recv(min(length - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def _serve(channel: socket.socket) -> None:
    """Run jobs until the parent closes the socket, or `MAX_CALLS` is reached."""
    for number in range(MAX_CALLS):
        try:
            (*called, arguments), prepare, cpu_s, memory_bytes = _receive(channel)
        except (EOFError, OSError):
            return
        if prepare is not None:
            (*prepared, prepare_arguments) = prepare
            _function(*prepared)(*prepare_arguments)
        function = _function(*called)
        _send(channel, "prepared")
        before = _address_space()
        answer: dict[str, Any] = {"result": None, "raised": None, "is_memory": False}
        is_spoilt = False
        _limit(cpu_s, before + memory_bytes)
        try:
            answer["result"] = function(*arguments)
        except MemoryError:
            answer["is_memory"] = is_spoilt = True
        except Exception as error:
            answer["raised"] = [type(error).__name__, str(error)]
        except BaseException as error:  # a panic of Rust, after which a library's state is unreliable
            answer["raised"], is_spoilt = [type(error).__name__, str(error)], True
        _limit(0.0, None)
        is_large = _address_space() - before > MAX_KEPT_BYTES
        answer["retires"] = is_spoilt or is_large or number == MAX_CALLS - 1
        _send(channel, answer)


def _nothing() -> None:
    return


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(cpu_s: float, address_space: int | None) -> None:
    """Limit this process's CPU time from now on, and its address space; 0 and None remove the limits."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # RLIMIT_CPU has a resolution of whole seconds
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard if address_space is None else address_space, hard))


def main(arguments: list[str]) -> None:
    """Serve the parent. Arguments: the descriptor of the socket, the parent's process id, the niceness."""
    descriptor, parent, niceness = map(int, arguments)
    for number in (signal.SIGHUP, signal.SIGUSR2):  # often sent by a program's name, for servers
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    die_with(parent)
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(socket.socket(fileno=descriptor),))
    serving.start()
    serving.join()


if __name__ == "__main__":
    main(sys.argv[1:])
