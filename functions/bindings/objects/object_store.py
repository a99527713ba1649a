"""The Durable Objects of one function: their instances, and their files (at most 128 open).

Each object has one instance. Starting another one, in any process, makes the earlier one stale: its requests are refused and its uncommitted writes
rolled back, so two instances never write the same state. Alarms are in functions/bindings/objects/alarms.py.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from pilotlight.functions.bindings.objects.object_file import TIME_LIMIT_S, ObjectFile
from pilotlight.functions.bindings.place import name_of
from pilotlight.functions.manifest import WORKFLOW_PREFIX
from pilotlight.support.database import MAX_WAITING, DatabaseError

log = logging.getLogger("pilotlight.bindings")
T = TypeVar("T")
THREADS = 2


@dataclass(frozen=True)
class ObjectLimits:
    """The most that the objects of one function may use."""

    open_files: int = 128  # the least recently used one is closed to open another
    instances: int = 100_000  # whose numbers are kept in memory
    waiting: int = MAX_WAITING  # requests for one object's storage
    sql_s: float = TIME_LIMIT_S


class ObjectKey(NamedTuple):
    class_name: str
    id: str


class Stale(Exception):
    """The caller is no longer the object's instance."""


class ClassGone(Exception):
    """The object's class was renamed or deleted, or could not be moved; the message has the reason."""


class ObjectStore:
    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        history_s: float = 0.0,
        limits: ObjectLimits = ObjectLimits(),
    ) -> None:
        """`history_s` is how long histories of objects are kept; 0 keeps none."""
        self._limits = limits
        self._directory = directory
        self._history_s = history_s
        self._max_bytes = max_bytes
        self._files: OrderedDict[ObjectKey, ObjectFile] = OrderedDict()
        self._locks: dict[ObjectKey, asyncio.Lock] = {}
        self._users: dict[ObjectKey, int] = {}
        self._instances: OrderedDict[ObjectKey, int] = OrderedDict()
        self._last_instance = 0
        self._moving: frozenset[str] = frozenset()  # classes whose objects are being moved or deleted
        self._move: asyncio.Task[None] | None = None
        self.gone: Mapping[str, str] = {}  # classes whose objects must not be opened, with the reason
        self._executor: ThreadPoolExecutor | None = None

    async def start(self, key: ObjectKey, note_alarm: Callable[[ObjectKey, int], Awaitable[None]] | None = None) -> int:
        """Start a new instance and return its number.
        Uncommitted writes of the previous instance are rolled back. If a bookmark is restored, its alarm is noted."""
        self._last_instance += 1
        number = self._instances[key] = self._last_instance
        self._instances.move_to_end(key)
        while len(self._instances) > self._limits.instances:
            self._instances.popitem(last=False)  # the evicted instance is now stale; its next request restarts it
        if await self.run(key, lambda file: file.start()):
            alarm = await self.run(key, lambda file: file.alarm())
            if alarm is not None and note_alarm is not None:
                await note_alarm(key, alarm.at_ms)
            await self.run(key, lambda file: file.forget_restoration())
        return number

    def is_current(self, key: ObjectKey, instance: int) -> bool:
        return self._instances.get(key) == instance

    async def reset(self, key: ObjectKey) -> None:
        """Make the current instance stale and roll back its uncommitted writes."""
        self._instances.pop(key, None)
        await self.run(key, lambda file: file.rollback())

    async def run(self, key: ObjectKey, work: Callable[[ObjectFile], T], instance: int | None = None) -> T:
        """Run `work` on the object's file in a thread, after all earlier work of this object.

        With `instance` None the work is the runtime's own. Raises Stale if the instance was replaced, ClassGone, DatabaseError, and the exceptions of
        `work`.
        """
        if self._users.get(key, 0) >= (most := self._limits.waiting):
            raise DatabaseError(f"{most} requests wait for this object's storage already", "overloaded")
        return await asyncio.shield(asyncio.ensure_future(self._alone(key, work, instance)))

    def move(self, classes: Iterable[str], gone: Mapping[str, str], work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, which moves or deletes the objects of these classes, once their files are closed.
        Their instances become stale. Requests for these classes wait; requests for classes in `gone` are refused."""
        before, moved = self._move, frozenset(classes)
        self._moving, self.gone = self._moving | moved, {**self.gone, **gone}
        for key in [key for key in self._instances if key.class_name in moved]:
            del self._instances[key]
        self._move = asyncio.create_task(self._moved(before, moved, work), name="migrations of objects")

    def path_of(self, key: ObjectKey) -> Path:
        return self._directory / name_of(key.class_name) / key.id[:2] / f"{key.id}.sqlite"

    async def close(self) -> None:
        if self._move is not None:
            await asyncio.gather(self._move, return_exceptions=True)
        executor, self._executor = self._executor, None
        files, self._files = self._files, OrderedDict()
        if executor is not None:
            for file in files.values():
                await asyncio.get_running_loop().run_in_executor(executor, file.close)
            executor.shutdown(wait=False)

    async def _moved(
        self, before: "asyncio.Task[None] | None", classes: frozenset[str], work: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            for key in {key for key in (*self._files, *self._locks) if key.class_name in classes}:
                await self._close(key)
            await work()
        except Exception as error:
            log.exception("objects could not be moved")
            sentence = (
                f"the objects of the class could not be moved ({error}); this is repeated when the site starts again"
            )
            self.gone = {**self.gone, **dict.fromkeys(classes, sentence)}
        finally:
            if self._move is asyncio.current_task():
                self._moving = frozenset()

    async def _alone(self, key: ObjectKey, work: Callable[[ObjectFile], T], instance: int | None) -> T:
        while instance is None and key.class_name in self._moving and key.class_name not in self.gone:
            assert self._move is not None
            await asyncio.wait({self._move})
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                if (why := self.gone.get(key.class_name)) is not None:
                    raise ClassGone(why)
                if key.class_name in self._moving or (instance is not None and self._instances.get(key) != instance):
                    raise Stale
                return await self._work(key, work, instance)
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]

    async def _work(self, key: ObjectKey, work: Callable[[ObjectFile], T], instance: int | None) -> T:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="objects")
        loop, file = asyncio.get_running_loop(), self._files.get(key)
        if file is None:
            history_s = 0.0 if key.class_name.startswith(WORKFLOW_PREFIX) else self._history_s
            given = self.path_of(key), self._max_bytes, history_s
            opened = partial(ObjectFile, *given, time_limit_s=self._limits.sql_s)
            file = await loop.run_in_executor(self._executor, opened)
            self._files[key] = file
        self._files.move_to_end(key)
        was_dirty = file.is_dirty
        try:
            return await loop.run_in_executor(self._executor, work, file)
        except BaseException:
            if was_dirty and not file.is_dirty:
                self._instances.pop(key, None)  # uncommitted writes are lost, so the instance must restart
            raise
        finally:
            await self._close_unused()

    async def _close_unused(self) -> None:
        unused = (key for key, file in self._files.items() if key not in self._users and not file.is_dirty)
        while len(self._files) > self._limits.open_files and (key := next(unused, None)) is not None:
            await self._close(key)
            unused = (key for key, file in self._files.items() if key not in self._users and not file.is_dirty)

    async def _close(self, key: ObjectKey) -> None:
        self._users[key] = self._users.get(key, 0) + 1  # so that no request reopens the file before it is closed
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if (file := self._files.pop(key, None)) is not None:
                await asyncio.get_running_loop().run_in_executor(self._executor, file.close)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._locks[key]
