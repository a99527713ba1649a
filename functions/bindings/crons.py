"""Cron triggers: call a function's `scheduled` handler in the minutes that its manifest names.

A firing is recorded on disk before its handler runs, so no restart, reload or second process runs it twice. Of the firings missed while the site was
down only the latest is run; a handler that a crash interrupted is not run again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from pilotlight.functions.bindings.binding import CLOCK, Clock, Services
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.cron import Schedule
from pilotlight.support.database import Connection, Database

log = logging.getLogger("pilotlight.function")

SCHEMA = "CREATE TABLE IF NOT EXISTS fired (cron TEXT PRIMARY KEY, at_s REAL NOT NULL)"
CATCH_UP_S = 24 * 3600.0  # firings that were missed longer ago are dropped
Run = Callable[[str, int], Awaitable[None]]
"""Arguments: the cron expression, and the minute as Unix time in ms."""


class Crons:
    """The cron triggers of one function; they run until closed."""

    def __init__(
        self,
        schedules: Iterable[Schedule],
        run: Run,
        database: Database,
        clock: Clock = CLOCK,
        pause_after_error_s: float = 5.0,
    ) -> None:
        self._look_s = clock.look_s
        self._pause_after_error_s = pause_after_error_s
        self._run = run
        self._database = database
        self._now_s = clock.schedule_s
        self._runs: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._follow(schedule)) for schedule in schedules]

    @classmethod
    def open(cls, schedules: Iterable[Schedule], run: Run, state_dir: Path, services: Services) -> "Crons":
        path = directory_of(state_dir, "cron", services.function) / "fired.sqlite"
        return cls(schedules, run, services.database(path, SCHEMA), services.clock)

    def stop(self) -> None:
        """Start no new handlers. Running handlers continue, and firings already claimed still run."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, schedule: Schedule) -> None:
        after: datetime | None = None
        while True:
            try:
                if after is None:
                    after = await self._since(schedule)
                now = datetime.fromtimestamp(self._now_s(), UTC)
                due = schedule.last_until(now, after)
                if due is None:
                    following = schedule.next_after(now)
                    wait_s = inf if following is None else (following - now).total_seconds()
                    await asyncio.sleep(min(self._look_s, wait_s))
                    continue
                after = due
                await asyncio.shield(self._begin(schedule, due))
            except Exception:
                log.exception("the cron trigger %s continues after an error", schedule.text)
                await asyncio.sleep(self._pause_after_error_s)

    async def _since(self, schedule: Schedule) -> datetime:
        """Return the time after which firings are due: the last one, at most a day ago; now if there is none."""
        now_s = self._now_s()

        def look(connection: Connection) -> float:
            connection.execute("INSERT INTO fired VALUES (?, ?) ON CONFLICT DO NOTHING", (schedule.text, now_s))
            return float(connection.execute("SELECT at_s FROM fired WHERE cron = ?", (schedule.text,)).fetchone()[0])

        at_s = await self._database.run(look)
        return datetime.fromtimestamp(max(at_s, now_s - CATCH_UP_S), UTC)

    async def _claims(self, schedule: Schedule, due: datetime) -> bool:
        values = (due.timestamp(), schedule.text, due.timestamp())
        query = "UPDATE fired SET at_s = ? WHERE cron = ? AND at_s < ?"
        return await self._database.run(lambda connection: connection.execute(query, values).rowcount == 1)

    def _begin(self, schedule: Schedule, due: datetime) -> "asyncio.Task[None]":
        """Claim a firing and start its handler.
        The returned task ends once the firing is claimed. It survives the cancellation of its caller."""

        async def claim() -> None:
            if await self._claims(schedule, due):
                self._keep(self._fire(schedule, due), schedule)

        return self._keep(claim(), schedule)

    def _keep(self, work: Coroutine[None, None, None], schedule: Schedule) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"cron {schedule.text}")
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)
        return task

    async def _fire(self, schedule: Schedule, due: datetime) -> None:
        try:
            await self._run(schedule.text, int(due.timestamp() * 1000))
        except Failure as failure:
            level = logging.INFO if failure.code == "closing" else logging.ERROR  # its process reports its end
            log.log(level, "the cron trigger %s of %s failed: %s", schedule.text, due.isoformat(), failure.message)
