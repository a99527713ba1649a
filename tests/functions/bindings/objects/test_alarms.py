"""Alarms of objects and their file: each runs at least once when due, and is retried after growing pauses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.objects.alarms import AGAIN_MS, FIRST_PAUSE_MS, MAX_RETRIES, Alarms
from pilotlight.functions.bindings.objects.object_file import Alarm, ObjectFile
from pilotlight.functions.bindings.objects.object_store import ObjectKey, ObjectStore
from pilotlight.functions.channel.failure import Failure
from tests.asgi import eventually
from tests.functions.bindings.set_clock import SetClock

KEY, OTHER = ObjectKey("Counter", "0" * 64), ObjectKey("Counter", "1" * 64)


class Ringing:
    """One function's alarms and their objects, with a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now_ms, self.clock = 1000, SetClock(1.0)
        self.rung: list[tuple[ObjectKey, str, Any]] = []
        self.outcomes: list[Failure] = []  # failures of the next runs
        self.while_ringing: Callable[[ObjectFile], None] = lambda file: None
        self.store = ObjectStore(folder / "objects", 1 << 20)
        self._path = folder / "alarms.sqlite"
        self.alarms = self.new()

    def new(self) -> Alarms:
        return Alarms(self._path, self.store, self._ring, self.clock)

    async def _ring(self, key: ObjectKey, called: str, args: list[Any]) -> None:
        self.rung.append((key, called, args[0] if args else None))
        await self.store.run(key, self.while_ringing)
        if self.outcomes:
            raise self.outcomes.pop(0)

    async def set(self, at_ms: int, key: ObjectKey = KEY) -> None:
        await self.store.run(key, lambda file: _set(file, at_ms))
        await self.alarms.note(key, at_ms)

    async def turn_to(self, now_ms: int) -> None:
        """Set the clock and wake the alarms."""
        self.now_ms, self.clock.now = now_ms, (now_ms + 0.5) / 1000
        await self.set(10**15, OTHER)
        await asyncio.sleep(0.01)

    async def alarm(self) -> Alarm | None:
        return await self.store.run(KEY, ObjectFile.alarm)

    async def until_rung(self, times: int) -> None:
        """Wait until the alarm has run `times` times and its outcome is recorded."""
        await eventually(lambda: len(self.rung) == times)
        await eventually(lambda: not any(task.get_name() == "alarm of Counter" for task in asyncio.all_tasks()))

    @property
    def infos(self) -> list[Any]:
        return [info for key, called, info in self.rung if (key, called) == (KEY, "alarm")]


def _set(file: ObjectFile, at_ms: int) -> None:
    file.set_alarm(at_ms)
    file.commit()


def _delete(file: ObjectFile) -> None:
    file.delete_alarm()
    file.commit()


@pytest.fixture
async def ringing(tmp_path: Path) -> AsyncIterator[Ringing]:
    made = Ringing(tmp_path)
    yield made
    await made.alarms.close()
    await made.store.close()


FIRST = {"retryCount": 0, "isRetry": False}
BROKEN = Failure("it breaks")


async def test_an_alarm_rings_at_its_time_and_once(ringing: Ringing) -> None:
    await ringing.set(2000)
    await ringing.turn_to(1999)
    assert ringing.rung == []
    await ringing.turn_to(2000)
    await ringing.until_rung(1)
    assert (ringing.infos, await ringing.alarm()) == ([FIRST], None)
    await ringing.turn_to(10**6)
    assert len(ringing.rung) == 1


async def test_what_its_handler_has_set_stays_whether_it_fails_or_not(ringing: Ringing) -> None:
    for fails in (False, True):
        ringing.outcomes = [BROKEN] * fails
        ringing.while_ringing = lambda file: _set(file, 9 * 10**6)
        await ringing.set(ringing.now_ms)
        await ringing.until_rung(1)
        assert await ringing.alarm() == Alarm(9 * 10**6, 0, False)
        ringing.while_ringing = _delete
        ringing.outcomes = [BROKEN] * fails
        await ringing.set(ringing.now_ms)
        await ringing.until_rung(2)
        assert await ringing.alarm() is None
        ringing.rung.clear()


async def test_one_that_fails_rings_again_with_growing_pauses_and_is_given_up(ringing: Ringing) -> None:
    ringing.outcomes = [BROKEN] * (MAX_RETRIES + 1)
    await ringing.set(ringing.now_ms)
    for retry in range(MAX_RETRIES):
        await ringing.until_rung(retry + 1)
        due_ms = ringing.now_ms + FIRST_PAUSE_MS * 2**retry
        assert await ringing.alarm() == Alarm(due_ms, retry + 1, False)
        await ringing.turn_to(due_ms - 1)
        assert len(ringing.rung) == retry + 1
        await ringing.turn_to(due_ms)
    await ringing.until_rung(MAX_RETRIES + 1)
    assert ringing.infos == [FIRST, *({"retryCount": n, "isRetry": True} for n in range(1, MAX_RETRIES + 1))]
    assert await ringing.alarm() is None


async def test_one_that_could_not_be_delivered_is_no_retry(ringing: Ringing) -> None:
    ringing.outcomes = [Failure("full", code="overloaded")]
    await ringing.set(ringing.now_ms)
    await ringing.until_rung(1)
    assert await ringing.alarm() == Alarm(ringing.now_ms + AGAIN_MS, 0, False)
    await ringing.turn_to(ringing.now_ms + AGAIN_MS)
    await ringing.until_rung(2)
    assert (ringing.infos, await ringing.alarm()) == ([FIRST, FIRST], None)


async def test_one_that_rang_when_its_process_died_rings_in_the_next_ones_life(ringing: Ringing) -> None:
    await ringing.store.run(KEY, lambda file: (file.set_alarm(500, 2, is_running=True), file.commit()))
    await ringing.alarms.note(OTHER, 10**15)
    await ringing.alarms.close()
    ringing.alarms = ringing.new()
    await ringing.alarms.note(KEY, 500)
    await ringing.until_rung(1)
    assert ringing.infos == [{"retryCount": 2, "isRetry": True}]


async def test_an_alarm_that_was_never_committed_does_not_ring_and_is_asked_for_no_more(ringing: Ringing) -> None:
    await ringing.alarms.note(KEY, 500)
    await ringing.turn_to(2000)
    assert ringing.rung == []
    await ringing.store.run(KEY, lambda file: file.set_alarm(500))
    await ringing.alarms.note(KEY, 500)
    await eventually(lambda: (KEY, "_wake", None) in ringing.rung)
    assert ringing.infos == [], "an uncommitted alarm must not run"
    await ringing.store.run(KEY, ObjectFile.commit)
    await eventually(lambda: ringing.infos == [FIRST])


async def test_of_two_times_the_earlier_is_kept_until_the_object_says_otherwise(ringing: Ringing) -> None:
    await ringing.set(5000)
    await ringing.alarms.note(KEY, 3000)
    await ringing.turn_to(3000)
    assert ringing.rung == []
    await ringing.turn_to(5000)
    await ringing.until_rung(1)
