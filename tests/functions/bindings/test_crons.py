"""Cron triggers and their file: each minute runs once, across restarts, reloads and clock changes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from pilotlight.functions import cron
from pilotlight.functions.bindings import crons
from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.bindings.crons import Crons
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import ScheduledEvent
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.manifest import ManifestError, load_manifest
from pilotlight.support.database import Database, Databases, Work, create
from tests.asgi import eventually
from tests.functions.bindings.set_clock import SetClock

T = TypeVar("T")
NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC).timestamp()


class Site:
    def __init__(self) -> None:
        self.fired: list[tuple[str, str]] = []
        self.failing = False

    async def run(self, expression: str, scheduled_time_ms: int) -> None:
        self.fired.append((expression, datetime.fromtimestamp(scheduled_time_ms / 1000, UTC).strftime("%H:%M")))
        if self.failing:
            raise Failure("the handler failed")


async def looked(clock: SetClock, times: int = 6) -> None:
    """Wait until the triggers have read the clock `times` more times; due runs are then claimed."""
    before = clock.num_reads
    await eventually(lambda: clock.num_reads >= before + times)


class SpyDatabase(Database):
    """A database whose work a test fails or holds up."""

    fault: Exception | None = None  # error of the next work
    worked = may_go_on = cast("asyncio.Event", None)

    async def run(self, work: Work[T], time_limit_s: float = 30.0) -> T:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        result = await super().run(work, time_limit_s)
        if self.may_go_on is not None:
            self.worked.set()
            await self.may_go_on.wait()
        return result


@pytest.fixture
def databases() -> list[SpyDatabase]:
    """The databases of the started cron triggers."""
    return []


@pytest.fixture
async def start(databases: list[SpyDatabase], tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Crons]]]:
    made: list[Crons] = []

    async def begin(site: Site, clock: SetClock, *expressions: str) -> Crons:
        """Start cron triggers at the clock's time."""
        database = SpyDatabase(tmp_path / "fired.sqlite", lambda connection: create(connection, crons.SCHEMA))
        databases.append(database)
        made.append(Crons([cron.parse(text) for text in expressions], site.run, database, clock, 0.005))
        query = "SELECT COUNT(*) FROM fired"
        while await database.run(lambda connection: connection.execute(query).fetchone()[0]) < len(expressions):
            await asyncio.sleep(0.005)
        return made[-1]

    yield begin
    for each in made:
        await each.close()
    for database in databases:
        await database.close()


async def test_each_minute_fires_once_and_a_failure_does_not_end_the_trigger(
    start: Callable[..., Awaitable[Crons]],
) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    await start(site, clock, "*/5 * * * *", "0 * * * *")
    await looked(clock)
    assert site.fired == []
    clock.now, site.failing = NOON + 1, True
    await eventually(lambda: len(site.fired) == 2)
    clock.now, site.failing = NOON + 301, False
    await eventually(lambda: len(site.fired) == 3)
    await looked(clock)
    assert sorted(site.fired) == [("*/5 * * * *", "12:00"), ("*/5 * * * *", "12:05"), ("0 * * * *", "12:00")]


async def test_what_was_missed_while_the_site_was_down_fires_once(start: Callable[..., Awaitable[Crons]]) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    first = await start(site, clock, "*/5 * * * *")
    clock.now = NOON + 1
    await eventually(lambda: site.fired == [("*/5 * * * *", "12:00")])
    await first.close()
    clock.now = NOON + 1000
    await start(site, clock, "*/5 * * * *")
    await eventually(lambda: len(site.fired) == 2)
    await looked(clock)
    assert site.fired[1:] == [("*/5 * * * *", "12:15")]


async def test_what_was_missed_more_than_a_day_ago_is_forgotten(start: Callable[..., Awaitable[Crons]]) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    first = await start(site, clock, "0 13 21 11 *", "0 14 21 11 *", "0 * * * *")
    await first.close()
    clock.now = NOON + 25.5 * 3600
    await start(site, clock, "0 13 21 11 *", "0 14 21 11 *", "0 * * * *")
    await eventually(lambda: len(site.fired) == 2)
    await looked(clock)
    assert sorted(site.fired) == [("0 * * * *", "13:00"), ("0 14 21 11 *", "14:00")]


async def test_two_that_follow_the_same_trigger_fire_it_once(start: Callable[..., Awaitable[Crons]]) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    for _ in range(3):
        await start(site, clock, "* * * * *")
    for minute in range(5):
        clock.now = NOON + 60 * minute + 1
        await eventually(lambda count=minute + 1: len(site.fired) >= count)
        await looked(clock)
    assert [at for _, at in site.fired] == ["12:00", "12:01", "12:02", "12:03", "12:04"]


async def test_a_trigger_continues_after_a_fault_of_its_file(
    start: Callable[..., Awaitable[Crons]], databases: list[SpyDatabase]
) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    await start(site, clock, "* * * * *")
    (database,) = databases
    database.fault = RuntimeError("a fault")
    clock.now = NOON
    await eventually(lambda: database.fault is None)
    clock.now = NOON + 60
    await eventually(lambda: site.fired == [("* * * * *", "12:01")])


async def test_a_clock_that_is_set_back_repeats_nothing(start: Callable[..., Awaitable[Crons]]) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    await start(site, clock, "* * * * *")
    clock.now = NOON + 121
    await eventually(lambda: len(site.fired) == 1)
    clock.now = NOON + 1
    await looked(clock)
    clock.now = NOON + 130
    await looked(clock)
    assert [at for _, at in site.fired] == ["12:02"]


async def test_a_minute_that_is_claimed_while_its_clock_stops_is_run(
    start: Callable[..., Awaitable[Crons]], databases: list[SpyDatabase]
) -> None:
    site, clock = Site(), SetClock(NOON - 30)
    made = await start(site, clock, "* * * * *")
    (database,) = databases
    database.worked, database.may_go_on = asyncio.Event(), asyncio.Event()
    clock.now = NOON + 1
    await asyncio.wait_for(database.worked.wait(), 60)
    made.stop()
    database.may_go_on.set()
    await eventually(lambda: site.fired == [("* * * * *", "12:00")])


async def test_the_triggers_of_a_manifest_are_followed(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n[triggers]\ncrons = ["* * * * *"]\n')
    clock = SetClock(NOON - 30)
    fired: list[Any] = []

    class Functions:
        async def ask(self, function: str, event: ScheduledEvent) -> None:
            fired.append((function, event.cron, event.scheduled_time_ms))

    services = Services(databases=Databases(), clock=clock)
    bindings = FunctionBindings.open(tmp_path / "state", services, load_manifest(tmp_path), Functions())
    bindings.start(None)  # the function has no consumers
    await looked(clock)
    clock.now = NOON + 1
    await eventually(lambda: fired == [("f", "* * * * *", int(NOON * 1000))])
    await bindings.close()
    await services.databases.close()


def test_a_manifest_with_a_wrong_expression_is_refused(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n[triggers]\ncrons = ["61 * * * *"]\n')
    with pytest.raises(ManifestError, match="'61' is no minute"):
        load_manifest(tmp_path)
