"""The ledger: each record once, whatever happens to its store."""

import asyncio
import os
import resource
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from msgspec.structs import replace

from load_tests.postgres import Postgres
from pilotlight.edge_router.admission.quotas.daily import DailyQuotas
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger import Ledger, LedgerTimings
from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery
from pilotlight.edge_router.requests.request import Head, RequestParser
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import CustomerConfig, LedgerConfig
from pilotlight.wire.credentials import Account, Key
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.meters import FILE_NAME, MeterFile
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest
from tests.asgi import eventually
from tests.edge_router.metering.ledger.conftest import PRICES, FailingStore, Place, empty

TOKENS = ResourceUse(10, 4, 20, 0)
COST = 6 * 1000 + 20 * 2000


def asked(account: str = "acme", model: str = "m", more: bytes = b"") -> Any:
    head = Head("POST", "/v1/completions", "/v1/completions", [])
    head.hold(Key(f"{account}-ci", "", account=Account(account)))
    return RequestParser("", 4, lambda *_: None).parse(head, b'{"model": "%s"%s}' % (model.encode(), more), "r", "")


def used(kept: Ledger, *, account: str = "acme", tokens: ResourceUse = TOKENS) -> None:
    meter = kept.begin(asked(account), "m")
    meter.answered_by("ams1")
    meter.count(tokens)
    kept.end(meter, "complete", 0.5)


COLUMNS = "account, key, model, site, outcome, prompt_tokens, cached_tokens, output_tokens, cost"


def rows(place: Place) -> list[Any]:
    if place.url is not None:
        with psycopg.connect(place.url) as asking:
            return asking.execute(f"SELECT {COLUMNS} FROM usage").fetchall()
    connection = sqlite3.connect(place.directory / "usage.sqlite")
    try:
        return connection.execute(f"SELECT {COLUMNS} FROM usage").fetchall()
    finally:
        connection.close()


ROW = ("acme", "acme-ci", "m", "ams1", "complete", 10, 4, 20, COST)


async def test_an_ended_request_is_written_once_and_its_meter_is_free(place: Place) -> None:
    kept = place.ledger()
    writing = asyncio.create_task(kept.run())
    used(kept)
    async with asyncio.timeout(60):
        while kept.num_unwritten:
            await asyncio.sleep(0.01)
    assert rows(place) == [ROW]
    used(kept, tokens=ResourceUse())  # a refused request
    await asyncio.gather(*(kept.flush() for _ in range(3)))
    assert rows(place) == [ROW]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await kept.close()
    again = place.ledger()
    assert (again.num_unwritten, again.recovered) == (0, [])
    await again.close()
    assert rows(place) == [ROW]


async def test_sums_have_all_that_has_ended(place: Place) -> None:
    kept = place.ledger()
    for number in (1, 2):
        used(kept)
        (row,) = await kept.usage(UsageQuery())
        assert (row["requests"], row["output_tokens"]) == (number, number * TOKENS.output)
    await kept.close()


async def test_a_router_that_died_before_or_while_it_wrote_is_made_good_by_the_next(place: Place) -> None:
    store = FailingStore(place.store())
    kept = place.ledger(store=store)
    store.is_confirming = False  # records are written, but no meter is free before the process dies
    used(kept)
    cut = kept.begin(asked(), "m")
    cut.count(ResourceUse(10, 0, 3, 0))
    kept.begin(asked(), "m")  # it has no usage yet
    again = asked()
    again.head.usage_id = "resp_1"  # another router sends it again, and counts all of it
    kept.begin(again, "m").count(ResourceUse(10, 0, 3, 0))
    await kept.close()
    assert rows(place) == [ROW]
    after = place.ledger()
    recovered = ("acme", "acme-ci", "m", "", "recovered", 10, 0, 3, 10 * 1000 + 3 * 2000)
    assert sorted(rows(place)) == sorted([ROW, recovered])
    told = [(one.outcome, one.use.output) for one in after.recovered]
    assert told == [("recovered", 3), ("recovered", 0)], "ended requests had been reported to other routers earlier"
    await after.close()


async def test_records_of_workers_that_no_longer_exist_are_written_once(place: Place) -> None:
    gone, running, damaged = (place.directory / name for name in ("worker-3", "worker-4", "worker-5"))
    for folder, name in ((gone, "one"), (running, "two")):
        folder.mkdir()
        meters = MeterFile(folder / FILE_NAME, 16)
        request = MeteredRequest(name, name, "acme", "acme-ci", "m", time.time())
        ended, cut = meters.begin(request), meters.begin(replace(request, id=f"{name}, cut"))
        assert ended is not None
        assert cut is not None
        ended.answered_by("ams1")
        ended.count(TOKENS)
        meters.end(ended.number, "complete", time.time())
        if folder == gone:
            meters.close()
    damaged.mkdir()
    (damaged / FILE_NAME).write_bytes(b"something else" * 100)
    abandoned = [gone, running, damaged]
    for _ in range(2):
        kept = Ledger(LedgerConfig(store=place.url), place.directory, PRICES, abandoned=abandoned)
        assert rows(place) == [ROW], "the other process writes the rest"
        assert kept.num_unwritten == 0
        await kept.close()
    again = MeterFile(gone / FILE_NAME, 0)
    assert (again.num_slots, again.num_used) == (16, 0)


class Failing(NamedTuple):
    """A store that can be made to fail and to work again."""

    place: Place
    fail: Callable[[], None]
    mend: Callable[[], None]


def full_disk(directory: Path) -> Iterator[Failing]:
    """Yield a store on a disk that can be filled. If none can be mounted, the size of files can be limited instead."""
    directory.mkdir()
    size = "size=2m"
    is_mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", directory], capture_output=True).returncode == 0
    )
    try:
        if is_mounted:
            filler = directory / "filler"
            yield Failing(Place(directory), partial(_fill, filler), filler.unlink)
        else:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE)
            yield Failing(Place(directory), partial(limited, (1, before[1])), partial(limited, before))
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", directory], check=True)


def _fill(filler: Path) -> None:
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.fixture(params=["full disk", "killed database", "stopped database"])
def failing(process_tier: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Failing]:
    if request.param == "full disk":
        yield from full_disk(tmp_path / "disk")
        return
    server: Postgres = empty(request.getfixturevalue("postgres"))
    ways = (server.kill, server.start) if request.param == "killed database" else (server.stop, server.go_on)
    yield Failing(Place(tmp_path, server.url), *ways)  # noqa: PT022  # as above


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("policy", ["refuse", "serve"])
async def test_a_store_that_fails_under_load_loses_nothing(failing: Failing, policy: str) -> None:
    soon = LedgerTimings(write_every_s=0.01, try_again_s=0.1, answers_within_s=0.5)
    kept = failing.place.ledger(soon, when_failing=policy, max_unwritten=1000)
    taken = refused = 0
    under_way = kept.begin(asked(), "m")

    async def load() -> None:
        nonlocal taken, refused
        while True:
            try:
                used(kept)
                taken += 1
            except ApiError as error:
                refused += (error.word, error.retry_after_s) == ("overloaded", 5)
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(kept.run()), asyncio.create_task(load())]
    await until(lambda: len(rows(failing.place)) > 3)
    failing.fail()
    await until(lambda: kept.fault is not None)
    before = taken
    await until(lambda: refused > 20 or taken > before + 20)
    assert (refused > 0, taken > before) == ((True, False) if policy == "refuse" else (False, True))
    under_way.count(TOKENS)  # open requests continue to be counted
    under_way.answered_by("ams1")
    kept.end(under_way, "complete", 0.5)
    failing.mend()
    await until(lambda: kept.fault is None)
    after = taken
    await until(lambda: taken > after)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await kept.close()
    assert rows(failing.place) == [ROW] * (taken + 1)


async def test_a_router_that_is_full_of_unwritten_records_refuses_and_the_next_one_writes_them(place: Place) -> None:
    def full() -> FailingStore:
        return FailingStore(place.store(), writes=False)

    kept = place.ledger(store=full(), when_failing="serve", max_unwritten=16)
    for _ in range(16):
        used(kept)
    await kept.flush()
    with pytest.raises(ApiError, match="cannot be recorded"):
        kept.begin(asked(), "m")
    await kept.close()
    again = place.ledger(store=full(), when_failing="serve", max_unwritten=16)
    assert again.num_unwritten == 16
    await again.close()
    refused = full()
    with pytest.raises(ConfigError, match="disk is full"):
        place.ledger(store=refused)
    refused.close()
    await place.ledger().close()
    assert rows(place) == [ROW] * 16


async def test_a_store_that_cannot_be_had_stops_the_start_by_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Place(tmp_path / "file").ledger()
    (tmp_path / "usage.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Place(tmp_path).ledger()
    with pytest.raises(ConfigError, match="No such file or directory"):
        Place(tmp_path, f"postgresql://pilotlight@/postgres?host={tmp_path}").ledger()
    with pytest.raises(ConfigError, match="not a database URL"):
        Place(tmp_path, "postgresql://a@b/c?colour=red").ledger()


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_database_that_is_deleted_under_the_router_is_made_again(tmp_path: Path, is_replaced: bool) -> None:
    kept = Place(tmp_path).ledger()
    used(kept)
    await kept.flush()
    for name in ("usage.sqlite", "usage.sqlite-wal", "usage.sqlite-shm"):
        os.unlink(tmp_path / name)
    if is_replaced:  # the file was replaced by a backup
        (tmp_path / "usage.sqlite").touch()
    used(kept)
    await kept.close()
    assert rows(Place(tmp_path)) == [ROW]


async def test_a_clock_that_jumps_leaves_the_time_that_a_request_took(tmp_path: Path) -> None:
    now = time.time()
    store = FailingStore(Place(tmp_path).store())
    kept = Ledger(LedgerConfig(), tmp_path, PRICES, lambda: now, store=store)
    meter = kept.begin(asked(), "m")
    meter.count(TOKENS)
    now -= 86_400
    kept.end(meter, "complete", 2.0)
    await kept.close()
    (record,) = store.records
    assert record.ended_s == record.request.started_s + 2.0


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_router_that_restarts_knows_todays_usage_even_where_it_could_not_be_written(
    place: Place, is_failing: bool
) -> None:
    def opened() -> Ledger:
        return place.ledger(store=FailingStore(place.store(), writes=not is_failing), when_failing="serve")

    kept = opened()
    for _ in range(3):
        used(kept)
    await kept.close()
    again = opened()
    assert again.used_since(time.time() + 60.0) == []
    rows = [row for row in again.used_since(0.0) if row["account"] == "acme"]
    tokens = 3 * (TOKENS.prompt + TOKENS.output)
    assert sum(row["prompt_tokens"] + row["output_tokens"] for row in rows) == tokens
    quotas = DailyQuotas(time.time)
    quotas.set([CustomerConfig(name="acme", tokens_per_day=1000)])
    Accounting(PRICES, again, quotas)
    with pytest.raises(ApiError, match=f"{tokens} are used"):
        quotas.reserve("acme", 1000, 0)
    await again.close()


async def test_a_router_with_an_unreadable_store_knows_the_records_that_wait(place: Place) -> None:
    kept = place.ledger(store=FailingStore(place.store(), writes=False, reads=False), when_failing="serve")
    used(kept)
    (row,) = kept.used_since(0.0)
    assert row == {"account": "acme", "prompt_tokens": 10, "output_tokens": 20, "cost": COST}
    with pytest.raises(ApiError, match="the ledger cannot be read: database or disk is full") as refused:
        await kept.usage(UsageQuery())
    assert (refused.value.word, refused.value.retry_after_s) == ("overloaded", 5)
    await kept.close()


async def test_a_request_for_which_there_is_no_meter_takes_nothing_off_its_accounts_day(place: Place) -> None:
    kept = place.ledger(when_failing="serve", max_unwritten=16)
    quotas = DailyQuotas(time.time)
    quotas.set([CustomerConfig(name="acme", tokens_per_day=100_000)])
    accounting = Accounting(PRICES, kept, quotas)
    for _ in range(16):
        kept.begin(asked(), "m")
    for _ in range(3):
        with pytest.raises(ApiError, match="cannot be recorded right now"):
            await accounting.begin(asked(more=b', "max_tokens": 50'), lambda model: (model, ""))
    assert quotas.reserve("acme", 100_000, 0), "nothing of the quota is reserved"
    await kept.close()


async def test_what_could_not_be_written_is_tried_again_though_nothing_more_comes(tmp_path: Path) -> None:
    store = FailingStore(Place(tmp_path).store())
    kept = Place(tmp_path).ledger(LedgerTimings(write_every_s=0.0, try_again_s=0.01), store)
    store.writes = False
    writing = asyncio.create_task(kept.run())
    used(kept)
    await eventually(lambda: store.num_failed == 2)
    store.writes = True
    await eventually(lambda: not kept.num_unwritten)
    assert (kept.fault, rows(Place(tmp_path))) == (None, [ROW])
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await kept.close()


async def test_a_request_that_is_sent_again_is_written_once_by_whichever_router_ends_it_and_others_each_time(
    place: Place,
) -> None:
    for is_again in (False, True):
        kept = place.ledger()
        for usage_id in ("batch_1.1", ""):
            request = asked()
            request.head.usage_id = usage_id
            meter = kept.begin(request, "m", "french")
            assert (meter.request.id == usage_id, meter.request.is_sent_again) == 2 * (bool(usage_id),)
            assert meter.request.adapter == "french"
            assert meter.request.bytes_in == len(request.body)
            meter.count(TOKENS)
            kept.end(meter, "complete", 0.5)
        await kept.close()
        assert len(rows(place)) == (3 if is_again else 2)
