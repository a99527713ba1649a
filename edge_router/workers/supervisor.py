"""A router's supervisor: it owns the sockets, and starts, replaces and stops the workers.

Each worker has a separate socket that listens on the router's port (SO_REUSEPORT), so the kernel spreads connections evenly. The supervisor keeps the
sockets open, so connections that a worker has not accepted wait for its successor. SIGHUP reaches every worker. SIGUSR2 replaces the workers one by
one, such as after an upgrade: the old one accepts no more connections, and ends when its last stream has ended.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from pilotlight.edge_router.workers.role import WORKER_ENV, WorkerRole
from pilotlight.support import background
from pilotlight.support.service_manager import SOCKET_ENV, notify_ready
from pilotlight.support.signals import follow_signals, hold_signals, release_signals
from pilotlight.wire.http.listen import PARENT_PID_ENV, bind, url_of

START_LIMIT_S = 60.0
LOOK_EVERY_S = 0.02
RESTART_AFTER_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # delay by the number of failures in a row of one worker
STEADY_S = 10.0  # a worker that has served for this time did not fail at its start

log = logging.getLogger("pilotlight.router")


def shared_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Open sockets that listen on one port. Raises ListenError if the port is in use."""
    with bind(host, port) as alone:  # first without sharing, so that the port of another router is not taken
        port = alone.getsockname()[1]
    return [bind(host, port, is_shared=True) for _ in range(count)]


class WorkerPool:
    def __init__(
        self, arguments: list[str], listeners: list[socket.socket], folder: Path, url: str, drain_timeout_s: float
    ) -> None:
        """`arguments` start the worker's module; `folder` is private to this router."""
        self._arguments = arguments
        self._roles = [
            WorkerRole(index, len(listeners), listener.fileno(), folder) for index, listener in enumerate(listeners)
        ]
        self._url = url
        self._drain_timeout_s = drain_timeout_s
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._all: set[asyncio.subprocess.Process] = set()  # includes replaced workers that have not ended
        # held while a role gets another worker, so that it gets one if its worker ends while it is replaced
        self._changing = [asyncio.Lock() for _ in listeners]
        self._watching: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._wants_roll = asyncio.Event()

    async def run(self) -> int:
        """Run the workers until a stop signal; return the exit status."""
        follow_signals(self._stop, self._hang_up, self._drain_timeout_s)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._wants_roll.set)
        started = await asyncio.gather(*(self._start(role) for role in self._roles))
        if not all(started):
            self._stop()
        elif not self._stopping.is_set():
            log.info("listening on %s with %d workers", self._url, len(self._roles))
            notify_ready(f"listening on {self._url} with {len(self._roles)} workers")
        rolling = background.start(self._roll_when_asked, "the replacement of workers")
        await self._stopping.wait()
        await background.stop(rolling, *self._watching)
        await asyncio.gather(*(process.wait() for process in tuple(self._all)))
        return 0 if all(started) else 1

    def _stop(self) -> None:
        """Drain the workers; after a second stop signal end their streams at once."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def _hang_up(self) -> None:
        """Let the workers reload; those that start do so once they are ready."""
        self._signal(signal.SIGHUP)

    def _signal(self, number: int) -> None:
        for process in self._all:
            if process.returncode is None:
                process.send_signal(number)

    async def _start(self, role: WorkerRole) -> bool:
        """Start a worker for a role. Return whether it serves; if not, it has ended or was killed."""
        environment = {**os.environ, WORKER_ENV: role.encode(), PARENT_PID_ENV: str(os.getpid())}
        environment.pop(SOCKET_ENV, None)  # only the supervisor notifies the service manager
        hold_signals()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self._arguments,
                env=environment, pass_fds=[role.listener], start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            release_signals()
        self._all.add(process)
        ready, deadline = role.ready_file(process.pid), time.monotonic() + START_LIMIT_S
        while not ready.exists():
            if process.returncode is not None or self._stopping.is_set() or time.monotonic() > deadline:
                if process.returncode is None:
                    process.kill()
                self._all.discard(process)
                await process.wait()
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        ready.unlink()
        self._workers[role.index] = process
        watching = background.start(partial(self._watch, role, process), f"worker {role.index}")
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return True

    async def _watch(self, role: WorkerRole, process: asyncio.subprocess.Process) -> None:
        """Start another worker when this one ends, unless it was replaced before."""
        began = time.monotonic()
        await process.wait()
        self._all.discard(process)
        failures = 0 if time.monotonic() - began > STEADY_S else 1
        async with self._changing[role.index]:
            if self._workers[role.index] is not process:
                return
            log.error("worker %d ended with status %s: another one is started", role.index, process.returncode)
            await asyncio.sleep(RESTART_AFTER_S[failures])
            while not await self._start(role):
                failures = min(failures + 1, len(RESTART_AFTER_S) - 1)
                await asyncio.sleep(RESTART_AFTER_S[failures])

    async def _roll_when_asked(self) -> None:
        while True:
            await self._wants_roll.wait()
            self._wants_roll.clear()
            for role in self._roles:
                async with self._changing[role.index]:
                    old = self._workers[role.index]
                    has_started = await self._start(role)
                if not has_started:
                    log.error("worker %d was not replaced: its successor did not start", role.index)
                    break
                log.warning("worker %d was replaced: its streams continue in the old process", role.index)
                if old.returncode is None:
                    old.send_signal(signal.SIGUSR2)


def supervise(arguments: list[str], host: str, port: int, count: int, *, is_tls: bool, drain_timeout_s: float) -> int:
    """Run `count` workers of a module on one port; return the exit status. Raises ListenError."""
    listeners = shared_listeners(host, port, count)
    url = url_of(listeners[0], is_tls=is_tls)
    with tempfile.TemporaryDirectory(prefix="pilotlight-router-") as folder:

        async def run() -> int:
            return await WorkerPool(arguments, listeners, Path(folder), url, drain_timeout_s).run()

        return asyncio.run(run())
