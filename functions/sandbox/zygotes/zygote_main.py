"""The main module of zygotes: processes that have imported their modules and are forked on demand.

The site's zygote has imported the SDK and is trusted. It forks a zygote for each version of a function; that one confines itself, imports the
packages that the function needs, and forks the isolates. All speak the same protocol with the runtime over a SOCK_SEQPACKET socket: a message with
descriptors requests a child, and the reply has the child's pidfd. They are started with `python -I -S`, so that none of the runtime's packages can be
imported.
"""

import array
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

import brokered_sockets
from pilotlight.functions.channel.connection import current_request
from pilotlight.functions.sandbox.confinement import system, tiers
from pilotlight.functions.sandbox.zygotes import isolate_main, labelled_output, prefork, ready_child
from pilotlight.functions.sandbox.zygotes.control_messages import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Command,
    Confined,
    CreateZygote,
    Died,
    Failed,
    ForkIsolate,
    Imported,
    Report,
    Started,
    command_decoder,
)
from pilotlight.functions.sandbox.zygotes.ready_child import ReadyChild
from workers import nested_loops

OURS = ("pilotlight",)
FORK_AHEAD_MS = 5  # pause after a command, whose child goes first
# Objects that imports create between two garbage collections. Imports leave little garbage: of FastAPI's 59,000 objects, 131 after 190 ms; collecting
# it at Python's usual pace, and once more at the end, took 20 ms.
IMPORT_OBJECTS = 100_000
THREAD_STACK = 1 << 20  # stack size of threads in bytes; the default, 8 MiB, would count as the function's memory


def main(control_fd: int) -> None:
    """Run the site's zygote."""
    system.prctl(system.PR_SET_CHILD_SUBREAPER)
    system.give_up_terminal()
    for number in (signal.SIGHUP, signal.SIGUSR2):  # often sent by a program's name, for servers
        signal.signal(number, signal.SIG_IGN)
    _settle()
    ForkServer(socket.socket(fileno=control_fd), _function_zygote).run()


def contained(control_fd: int = 3) -> None:
    """Run a function's zygote in a container; its first message has the settings."""
    for name in set(os.environ) - {"LANG", "MALLOC_ARENA_MAX", "TZ"}:
        del os.environ[name]  # the OCI runtime set it
    _settle()
    control = socket.socket(fileno=control_fd)
    command = command_decoder.decode(control.recv(MAX_MESSAGE_BYTES))
    _function_zygote(command, [control.detach(), os.dup(1)])


def _settle() -> None:
    brokered_sockets.install_in_asyncio()
    _import_for_all()
    paths = tiers.interpreter()
    tiers.prepare()
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + [paths[-1]]
    labelled_output.install()
    nested_loops.allow()  # before the warm-up: it changes classes of asyncio, which undoes specialised bytecode
    sys.path_importer_cache.clear()
    threading.stack_size(THREAD_STACK)
    prefork.warm_up()
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]  # the author may have a module of that name
    gc.collect()


def _import_for_all() -> None:
    """Import the modules that most functions use, once for all."""
    for name in (
        "asgi", "wsgi", "js", "pyodide.ffi", "pyodide.http", "workers", "workers.bindings", "workers.rpc",
        "asyncio", "base64", "collections", "concurrent.futures.thread", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal",
        "email.message", "email.parser", "email.utils", "encodings.idna", "encodings.latin_1", "enum", "fractions", "functools", "hashlib", "hmac",
        "html", "http.client", "http.cookiejar", "http.cookies", "importlib.metadata", "importlib.resources", "inspect", "io", "itertools", "json",
        "logging", "math", "mimetypes", "pathlib", "pickle", "random", "re", "secrets", "shlex", "sqlite3", "ssl", "string", "stringprep", "struct",
        "tempfile", "textwrap", "time", "traceback", "typing", "urllib.parse", "urllib.request", "uuid", "zipfile", "zlib", "zoneinfo",
    ):  # fmt: skip
        with suppress(ImportError):  # a Python may be built without one of these modules
            importlib.import_module(name)


class ForkServer:
    """Forks children on command and reports their exits; the children end when its socket closes."""

    def __init__(self, control: socket.socket, child: Callable[[Any, list[int]], None]) -> None:
        self._control = control
        self._child = child
        self._children: dict[int, tuple[int, int]] = {}  # (pid, id of the command) by pidfd
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._ready: ReadyChild | None = None
        self._flags: int | None = None  # clone flags of functions' zygotes, once one was created

    def run(self) -> None:
        gc.freeze()  # garbage collection in a child would write to, and so copy, every page
        while True:
            found = self._poll.poll(None if self._flags is None or self._ready is not None else FORK_AHEAD_MS)
            if not found:
                self._fork_ahead()
            for fd, _ in found:
                if fd != self._control.fileno():
                    self._reap(fd)
                elif not self._handle_command():
                    self._end()
                    return

    def _handle_command(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        command = command_decoder.decode(data)
        try:
            pid = self._forked(command, data, fds)
        except OSError as error:
            self.send_report(Failed(command.id, str(error)))
            pid = -1
        if pid == 0:
            self._be_child(command, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = pid, command.id
            self._poll.register(pidfd, select.POLLIN)
            self.send_report(Started(command.id), pidfd)
        return True

    def _forked(self, command: Command, data: bytes, fds: list[int]) -> int:
        """Return the pid of a child that runs a command; 0 in a child that must run it. Raises OSError."""
        if not isinstance(command, CreateZygote):
            return system.clone(0)
        ready, self._ready = self._ready, None
        self._flags = tiers.namespaces(command.limits)
        if ready is not None:
            if ready.flags == self._flags and ready.take(data, fds):
                return ready.pid
            ready.end()
        return system.clone(self._flags)

    def _fork_ahead(self) -> None:
        """Fork a child for the next function's zygote."""
        flags, self._flags = self._flags, None
        if flags is not None:
            with suppress(OSError):  # the next command gets the error
                self._ready = ReadyChild(flags, partial(self._run_received, flags))

    def _run_received(self, flags: int, commands: socket.socket) -> None:
        _keep_only([commands.fileno()])
        if flags:
            with suppress(OSError):  # `confine` tries again, and reports the error
                tiers.prepare_root(flags)
        data, fds = ready_child.received(commands)
        if data:
            self._be_child(command_decoder.decode(data), fds)

    def _be_child(self, command: Command, fds: list[int]) -> None:
        """Run as the forked child; never return."""
        status = 1
        try:
            os.setpgid(0, 0)  # a process group, not a session: see priority.py
            _keep_only(fds)
            self._child(command, fds)
            status = 0
        except BaseException as error:
            with suppress(BaseException):
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):  # the author may have replaced the streams
                    stream.flush()
                    if isinstance(stream, labelled_output.LabelledOutput):
                        stream.finish()
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        pid, id = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        self.send_report(Died(id, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss))
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill the children of an exited child, which are now children of this process."""
        known = {pid for pid, _ in self._children.values()} | ({self._ready.pid} if self._ready is not None else set())
        with suppress(ChildProcessError, OSError):
            for pid in _children_of_this():
                if pid not in known:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _end(self) -> None:
        for pidfd in self._children:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, _ in self._children.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._kill_orphans()

    def send_report(self, report: Report, fd: int | None = None) -> None:
        send_report(self._control, report, fd)


def send_report(control: socket.socket, report: Report, fd: int | None = None) -> None:
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    with suppress(OSError):  # the runtime is gone; the next poll ends this process
        control.sendmsg([msgspec.msgpack.encode(report)], ancillary)


def _function_zygote(command: Command, fds: list[int]) -> None:
    assert isinstance(command, CreateZygote)
    control_fd, log = fds
    control = socket.socket(fileno=control_fd)
    _use_log(log)
    try:
        listener = tiers.confine(command.limits)
    except OSError as error:
        send_report(control, Failed(-1, f"this machine does not allow tier {command.limits.tier}: {error}"))
        return
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
    if command.limits.tier < 2:
        system.prctl(system.PR_SET_CHILD_SUBREAPER)
    send_report(control, Confined(), listener if listener >= 0 else None)
    if listener >= 0:
        os.close(listener)
    _use_layers(command.limits.layers)
    usual = gc.get_threshold()
    gc.set_threshold(IMPORT_OBJECTS)
    for name in command.imports:
        with suppress(BaseException):  # the isolate gets the same error and reports it to the author
            importlib.import_module(name)
    gc.set_threshold(*usual)
    send_report(control, Imported())

    def be_isolate(command: Command, fds: list[int]) -> None:
        assert isinstance(command, ForkIsolate)
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
        tiers.confine_copy(limits)
        channel, log, trace, broker = fds
        _use_log(log)
        brokered_sockets.use(broker, current_request.get)
        isolate_main.run(channel, trace, command.boot)

    limits = command.limits
    ForkServer(control, be_isolate).run()


def _use_layers(layers: list[str]) -> None:
    """Put directories of packages at the start of the import path, and process their `.pth` files."""
    sys.path[:0] = layers
    for layer in layers:
        with suppress(BaseException):  # of code in a `.pth` file; Python has printed ordinary exceptions
            if any(name.endswith(".pth") for name in os.listdir(layer)):
                import site  # imported late: few layers need it, and it delays a cold start

                site.addsitedir(layer)


def _keep_only(fds: list[int]) -> None:
    """Close all descriptors but `fds` and the output streams; standard input becomes /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    last = 3
    for fd in sorted(fds):
        os.closerange(last, fd)
        last = fd + 1
    os.closerange(last, 1 << 20)


def _use_log(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _children_of_this() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
