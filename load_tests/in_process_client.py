"""A client of an engine host that runs in a thread of the same process; needs only torch."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.protocol import VERSION, Command, Event, Hello, HostConfig, Shutdown
from pilotlight.engine.host.transport import FrontEndGone

Argument = TypeVar("Argument")

_LAST_WORD_S = 1.0  # how long the host may take to obey a Shutdown


class InProcessEngineClient(EngineClient):
    """A host in a thread of this process: the same loop without a socket, for tests and tools."""

    def __init__(self, config: HostConfig) -> None:
        super().__init__(Hello(VERSION))
        self._config = config
        self._thread: threading.Thread | None = None

    async def close(self) -> None:
        if self._thread is not None:
            self._transport.put(Shutdown())  # sent also to a host that was declared dead: it may only have been slow
            await asyncio.to_thread(self._thread.join, _LAST_WORD_S)
        self.fail("the client was closed")

    def _connect(self) -> None:
        from pilotlight.engine.host.engine_host import EngineHost
        from pilotlight.engine.host.model_loader import ModelLoader

        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            _call_soon(loop, self._handle, event)

        self._transport = _QueueTransport(deliver)

        def serve() -> None:
            try:
                EngineHost(self._transport, ModelLoader(self._config)).run()
            except BaseException as error:
                _call_soon(loop, self.fail, f"the engine host's thread failed with {type(error).__name__}: {error}")
                raise

        self._thread = threading.Thread(target=serve, name="engine-host", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        if self.death is None:
            self._transport.put(command)


class _QueueTransport:
    """A transport for a host loop in a thread of the front end's process."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._on_event = on_event

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Command | FrontEndGone]:
        received: list[Command | FrontEndGone] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                received.append(self._commands.get(timeout=0 if received else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return received

    def send(self, event: Event) -> None:
        self._on_event(event)

    def close(self) -> None:
        pass


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[Argument], None], argument: Argument) -> None:
    # RuntimeError: the loop is closed, so nothing waits for the event. The host's thread still gets its Shutdown, or ends with the process.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, argument)
