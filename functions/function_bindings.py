"""All bindings of one function, with its queue consumers and its cron triggers."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pilotlight.functions import cron
from pilotlight.functions.bindings.assets.asset_files import Assets, FetchCall
from pilotlight.functions.bindings.binding import Body, Functions, MemoryBudget, Services
from pilotlight.functions.bindings.crons import Crons
from pilotlight.functions.bindings.objects.durable_objects import STORAGE, ObjectStorage
from pilotlight.functions.bindings.queues import DEFAULT_CONCURRENCY, Deliver, Queue, QueueConsumer, Settings
from pilotlight.functions.bindings.registry import Bindings
from pilotlight.functions.bindings.storage.d1 import D1Database
from pilotlight.functions.bindings.storage.d1_migrations import MigrationFiles
from pilotlight.functions.bindings.storage.response_cache import CACHE, ResponseCache
from pilotlight.functions.channel.exchanges import ExchangeResult
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, BindingCall, FunctionEvent, QueueEvent, ScheduledEvent
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.manifest_tables import ConsumerDeclaration

MIGRATE_S = 60.0  # limit for all migrations of one database; a deployment waits for them

log = logging.getLogger("pilotlight.function")


class FunctionBindings:
    """The open bindings, queue consumers and cron triggers of one function. Needs a running event loop."""

    def __init__(self, manifest: Manifest, state_dir: Path, services: Services) -> None:
        self._bindings = Bindings(manifest.bindings, state_dir, services)
        self._cache = ResponseCache.of(state_dir, services)
        self._manifest = manifest
        self._state_dir = state_dir
        self._services = services
        self._consumers: list[QueueConsumer] = []
        self._stopped: list[QueueConsumer | Crons] = []  # may still have batches and runs in progress
        self._crons: Crons | None = None
        self._objects: ObjectStorage | None = None
        self._files = None if manifest.assets is None else Assets.open(manifest.assets.declaration, state_dir, services)
        if services.functions is not None:
            self._objects = ObjectStorage.of(manifest, state_dir, services)

    @classmethod
    def open(cls, state_dir: Path, services: Services, manifest: Manifest, functions: Functions) -> "FunctionBindings":
        """Open the bindings of one function of a site.
        Databases belong to `services`, whose creator closes them."""
        return cls(
            manifest, state_dir, replace(services, functions=functions, function=manifest.name, memory=MemoryBudget())
        )

    def start(self, ask: Callable[[FunctionEvent], Awaitable[ExchangeResult]]) -> None:
        """Start this version's queue consumers and cron triggers, and apply its migrations of Durable Objects.

        Consumers of an earlier version stop. `ask` sends an event to this version. Raises BindingError, with nothing changed, if another function
        consumes one of its queues.
        """
        functions, services, manifest = self._services.functions, self._services, self._manifest
        for declared in manifest.consumers if functions is not None else ():
            Queue.of(declared.queue, self._state_dir, services).check_consumer(services.function)
        if self._objects is not None:
            self._objects.migrate()
        if functions is None or self._consumers or self._crons is not None:
            return

        async def deliver(queue: str, messages: list[dict[str, Any]]) -> Any:
            outcome = (await ask(QueueEvent(UNNUMBERED, queue, messages))).value
            if not isinstance(outcome, dict) or not isinstance(outcome.get("acked"), list):
                raise Failure("the queue handler returned an invalid result", code="wrong_type")
            return outcome

        async def run(expression: str, scheduled_time_ms: int) -> None:
            await functions.ask(services.function, ScheduledEvent(UNNUMBERED, expression, scheduled_time_ms))

        for declared in manifest.consumers:
            self._consumers.append(_consumer(declared, deliver, self._state_dir, services))
        if manifest.crons:
            schedules = [cron.parse(expression) for expression in dict.fromkeys(manifest.crons)]
            self._crons = Crons.open(schedules, run, self._state_dir, services)

    async def migrate_databases(self) -> None:
        """Apply the pending migrations of the function's D1 databases, all or none of each database.
        Raises BindingError."""
        for declared in self._manifest.bindings:
            if isinstance(database := self._bindings.get(declared.name), D1Database):
                files = MigrationFiles.of(declared.options, self._manifest.directory)
                if waiting := await files.waiting(database):
                    await files.apply(database, waiting, MIGRATE_S)
                    names = ", ".join(path.name for path in waiting)
                    log.info("%s: migrations of %s were applied: %s", self._manifest.name, declared.name, names)

    @property
    def moves(self) -> tuple[str, ...]:
        """The tags of migrations that will rename or delete classes of objects when this version starts."""
        return () if self._objects is None else self._objects.moves

    def stop(self) -> None:
        """Take no more messages and firings; those in progress continue."""
        for consumer in self._consumers:
            consumer.stop()
        self._stopped += self._consumers
        self._consumers = []
        if self._crons is not None:
            self._crons.stop()
            self._stopped.append(self._crons)
            self._crons = None

    async def static(self, method: str, url: str, headers: list[tuple[str, str]]) -> Any:
        """Return the response of an asset that is served before the function; None if the function answers."""
        if self._files is None or self._manifest.assets is None or method not in ("GET", "HEAD"):
            return None
        if _is_first(self._manifest.assets.worker_first, unquote(urlsplit(url).path) or "/"):
            return None
        return await self._files.found(FetchCall(method, url, headers))

    async def answer(self, call: BindingCall, body: Body | None = None) -> Any:
        if call.binding == STORAGE and self._objects is not None:
            return await self._objects.call(call.method, call.args, call.kwargs, body)
        if call.binding == CACHE:
            return await self._cache.call(call.method, call.args, call.kwargs, body)
        return await self._bindings.answer(call, body)

    async def close(self) -> None:
        self.stop()
        for each in self._stopped:
            await each.close()
        await self._bindings.close()


def _is_first(patterns: tuple[str, ...], path: str) -> bool:
    """Tell whether the function answers this path even if there is an asset."""
    wanted = any(fnmatchcase(path, pattern) for pattern in patterns if not pattern.startswith("!"))
    return wanted and not any(fnmatchcase(path, pattern[1:]) for pattern in patterns if pattern.startswith("!"))


def _consumer(declared: ConsumerDeclaration, deliver: Deliver, state_dir: Path, services: Services) -> QueueConsumer:
    letters = declared.dead_letter_queue
    settings = Settings(
        declared.max_batch_size,
        declared.max_batch_timeout,
        declared.max_retries,
        declared.retry_delay,
        declared.max_concurrency or DEFAULT_CONCURRENCY,
    )
    dead_letters = Queue.of(letters, state_dir, services) if letters else None
    queue = Queue.of(declared.queue, state_dir, services)
    return QueueConsumer(queue, deliver, settings, dead_letters, services.function)
