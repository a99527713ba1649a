"""Alarms of Durable Objects: each runs when it is due, at least once, across restarts.

Failed alarms are retried after growing pauses.

An object's own file has its alarm. The file `alarms.sqlite` only lists the objects to look at; it may list too many, because it is written before the
object commits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pilotlight.functions.bindings.binding import CLOCK, NOT_DELIVERED, Clock
from pilotlight.functions.bindings.objects.object_file import Alarm, ObjectFile
from pilotlight.functions.bindings.objects.object_store import ObjectKey, ObjectStore
from pilotlight.functions.channel.failure import Failure
from pilotlight.support.database import Connection, Database, create

log = logging.getLogger("pilotlight.function")

MAX_RETRIES = 6
FIRST_PAUSE_MS = 2000  # doubled for each retry, as on the platform
AGAIN_MS = 1000  # pause if the object could not be reached
AT_ONCE = 32
SCHEMA = """
CREATE TABLE IF NOT EXISTS alarms (class TEXT NOT NULL, id TEXT NOT NULL, at_ms INTEGER NOT NULL,
  changes INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (class, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS alarms_by_time ON alarms (at_ms)
"""
MAX_BUSY = 10  # number of checks that find an open transaction, before the object gets an empty event
Ring = Callable[[ObjectKey, str, list[Any]], Awaitable[None]]
"""Calls a method of an object with arguments. The call comes from the runtime, not from a function."""


class Alarms:
    """The alarms of one function's objects; they run until closed."""

    def __init__(self, path: Path, store: ObjectStore, ring: Ring, clock: Clock = CLOCK) -> None:
        self._database = Database(path, lambda connection: create(connection, SCHEMA))
        self._store = store
        self._ring = ring
        self._clock = clock
        self._news = asyncio.Event()
        self._busy: dict[ObjectKey, int] = {}
        self._ringing: dict[ObjectKey, asyncio.Task[None]] = {}
        # Without a file there are no alarms, so the file need not be created to look for them.
        self._has_file = path.is_file()
        self._task = asyncio.create_task(self._run(), name=f"alarms of {path.parent.name}")

    async def note(self, key: ObjectKey, at_ms: int) -> None:
        """Record that the object's alarm may be due at this time, or earlier."""

        def write(connection: Connection) -> None:
            sql = (
                "INSERT INTO alarms (class, id, at_ms) VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET at_ms = min(at_ms, excluded.at_ms), changes = changes + 1"
            )
            connection.execute(sql, (*key, at_ms))

        await self._database.run(write)
        self._has_file = True
        self._news.set()

    async def rename(self, old: str, new: str) -> None:
        """Move the alarms of a class to its new name."""
        await self._change("UPDATE OR REPLACE alarms SET class = ? WHERE class = ?", (new, old))

    async def forget(self, class_name: str) -> None:
        await self._change("DELETE FROM alarms WHERE class = ?", (class_name,))

    async def close(self) -> None:
        tasks = (self._task, *self._ringing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.close()

    async def _change(self, sql: str, values: tuple[str, ...]) -> None:
        if self._has_file:
            await self._database.run(lambda connection: connection.execute(sql, values).close())
            self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                wait_s = await self._ring_due() if self._has_file else self._clock.look_s
            except Exception:
                log.exception("the alarms continue after an error")
                wait_s = 1.0
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _ring_due(self) -> float:
        """Start the alarms that are due; return the seconds until the next check."""
        now_ms = self._now_ms()

        def look(connection: Connection) -> list[tuple[str, str, int]]:
            sql = "SELECT class, id, at_ms FROM alarms ORDER BY at_ms LIMIT ?"
            return connection.execute(sql, (AT_ONCE + len(self._ringing) + 1,)).fetchall()

        for class_name, id, at_ms in await self._database.run(look):
            key = ObjectKey(class_name, id)
            if key in self._ringing:
                continue
            if at_ms > now_ms:
                return min(self._clock.look_s, (at_ms - now_ms) / 1000)
            if len(self._ringing) >= AT_ONCE:
                return self._clock.look_s  # the end of a running alarm triggers the next check
            task = self._ringing[key] = asyncio.create_task(self._handle(key), name=f"alarm of {class_name}")
            task.add_done_callback(lambda task, key=key: self._over(task, key))  # type: ignore[misc]
        return self._clock.look_s

    async def _handle(self, key: ObjectKey) -> None:
        alarm = await self._store.run(key, self._started)
        if isinstance(alarm, Alarm):
            await self._rung(key, alarm)
        elif alarm == "busy":
            return await self._wait(key)
        self._busy.pop(key, None)
        await self._correct(key)

    async def _wait(self, key: ObjectKey) -> None:
        """Wait until the object commits, usually a few ms.
        After MAX_BUSY waits the object gets an empty event, which ends a transaction that is too long or whose process died."""
        self._busy[key] = self._busy.get(key, 0) + 1
        if self._busy[key] <= MAX_BUSY:
            return await asyncio.sleep(0.02)
        del self._busy[key]
        with suppress(Failure):
            await self._ring(key, "_wake", [])  # no method has this name: the event only commits

    def _started(self, file: ObjectFile) -> Alarm | str:
        """Return the object's alarm and mark it as running if it is due; else return "busy" or "not due".
        Runs in the object's thread."""
        if file.is_dirty:
            return "busy"  # uncommitted writes may yet be rolled back
        alarm = file.alarm()
        if alarm is None or alarm.at_ms > self._now_ms():
            return "not due"
        file.set_alarm(alarm.at_ms, alarm.retries, is_running=True)
        file.commit()
        return alarm

    async def _rung(self, key: ObjectKey, alarm: Alarm) -> None:
        info = {"retryCount": alarm.retries, "isRetry": alarm.retries > 0}
        try:
            await self._ring(key, "alarm", [info])
        except Failure as failure:
            if failure.code in NOT_DELIVERED:
                await self._store.run(key, lambda file: self._again(file, alarm.retries, AGAIN_MS))
                return
            log.error("the alarm of a %s failed: %s", key.class_name, failure.detail or failure.message)
            if alarm.retries < MAX_RETRIES:
                pause_ms = FIRST_PAUSE_MS * 2**alarm.retries
                await self._store.run(key, lambda file: self._again(file, alarm.retries + 1, pause_ms))
                return
            log.error("the alarm of a %s is abandoned after %d retries", key.class_name, MAX_RETRIES)
        await self._store.run(key, _done)

    def _again(self, file: ObjectFile, retries: int, pause_ms: int) -> None:
        alarm = file.alarm()
        if alarm is not None and alarm.is_running:  # false if the handler has set or deleted the alarm
            file.set_alarm(self._now_ms() + pause_ms, retries)
            file.commit()

    async def _correct(self, key: ObjectKey) -> None:
        """Update the list from the object's file, unless the object has uncommitted writes."""
        changes = await self._database.run(lambda connection: _changes(connection, key))
        alarm = await self._store.run(key, lambda file: "busy" if file.is_dirty else file.alarm())
        if alarm == "busy":
            return

        def write(connection: Connection) -> None:
            if isinstance(alarm, Alarm):
                sql = "UPDATE alarms SET at_ms = ? WHERE class = ? AND id = ? AND changes = ?"
                connection.execute(sql, (alarm.at_ms, *key, changes))
            else:
                connection.execute("DELETE FROM alarms WHERE class = ? AND id = ? AND changes = ?", (*key, changes))

        await self._database.run(write)

    def _now_ms(self) -> int:
        return int(self._clock.now_s() * 1000)

    def _over(self, task: "asyncio.Task[None]", key: ObjectKey) -> None:
        self._ringing.pop(key, None)
        self._news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the alarm of a %s will be retried: %s", key.class_name, error)


def _done(file: ObjectFile) -> None:
    alarm = file.alarm()
    if alarm is not None and alarm.is_running:
        file.delete_alarm()
        file.commit()


def _changes(connection: Connection, key: ObjectKey) -> int:
    row = connection.execute("SELECT changes FROM alarms WHERE class = ? AND id = ?", tuple(key)).fetchone()
    return -1 if row is None else int(row[0])
