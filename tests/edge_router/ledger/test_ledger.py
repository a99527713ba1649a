"""The ledger: each record once, whatever happens to its store."""

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from edge_router.ledger.accounting import Accounting
from edge_router.ledger.ledger import Ledger
from edge_router.ledger.prices import PriceList
from edge_router.ledger.quotas import DailyQuotas
from edge_router.ledger.records import MeteredRequest, UsageRecord
from edge_router.ledger.store import UsageQuery, UsageStore
from edge_router.request import Head, RequestParser
from sites.config import ConfigError
from sites.network import LedgerConfig, PriceConfig
from wire.credentials import Account, Key
from wire.errors import ApiError
from wire.usage import UsedTokens

TOKENS = UsedTokens(10, 4, 20, 0)
PRICES = PriceList([PriceConfig(model="m", input=1.0, cached_input=0.0, output=2.0)], "USD")
COST = 6 * 1000 + 20 * 2000


def ledger(directory: Path, **config: Any) -> Ledger:
    return Ledger(LedgerConfig(**config), directory, PRICES)


def asked(account: str = "acme", model: str = "m") -> Any:
    head = Head("POST", "/v1/completions", "/v1/completions", [])
    head.holder = Key(f"{account}-ci", "", account=Account(account))
    return RequestParser("", 4, lambda *_: None).parse(head, b'{"model": "%s"}' % model.encode(), "r", "")


def used(kept: Ledger, *, account: str = "acme", tokens: UsedTokens = TOKENS) -> None:
    meter = kept.begin(asked(account), "m")
    meter.answered_by("ams1")
    meter.count(tokens)
    kept.end(meter, "complete", 0.5)


COLUMNS = "account, key, model, site, outcome, prompt_tokens, cached_tokens, output_tokens, cost"


def rows(directory: Path) -> list[Any]:
    connection = sqlite3.connect(directory / "usage.sqlite")
    try:
        return connection.execute(f"SELECT {COLUMNS} FROM usage").fetchall()
    finally:
        connection.close()


ROW = ("acme", "acme-ci", "m", "ams1", "complete", 10, 4, 20, COST)


async def test_what_has_ended_is_written_once_and_its_meter_is_free(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    writing = asyncio.create_task(kept.run())
    used(kept)
    async with asyncio.timeout(10):
        while kept.num_unwritten:
            await asyncio.sleep(0.01)
    assert rows(tmp_path) == [ROW]
    used(kept, tokens=UsedTokens())  # a refusal
    await asyncio.gather(*(kept.flush() for _ in range(3)))
    assert rows(tmp_path) == [ROW]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await kept.close()
    again = ledger(tmp_path)
    assert again._meters.num_used == 0
    await again.close()
    assert rows(tmp_path) == [ROW]


async def test_a_router_that_died_before_or_while_it_wrote_is_made_good_by_the_next(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    used(kept)
    cut = kept.begin(asked(), "m")
    cut.count(UsedTokens(10, 0, 3, 0))
    kept.begin(asked(), "m")  # nothing came of it yet
    kept._add(tuple(kept._ended))  # written, and then it dies before the meter is free
    kept._store.close()
    kept._meters.close()
    again = ledger(tmp_path)
    recovered = ("acme", "acme-ci", "m", "", "recovered", 10, 0, 3, 10 * 1000 + 3 * 2000)
    assert sorted(rows(tmp_path)) == sorted([ROW, recovered])
    await again.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store that fails, as on a disk that is full, until `is_full` is False."""

    class Disk:
        is_full = True

    add = UsageStore.add

    def add_if_possible(self: UsageStore, records: Any) -> None:
        if Disk.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        add(self, records)

    monkeypatch.setattr(UsageStore, "add", add_if_possible)
    return Disk


async def test_a_full_disk_refuses_what_is_new_and_loses_nothing(tmp_path: Path, full_disk: Any) -> None:
    full_disk.is_full = False
    kept = ledger(tmp_path)
    under_way = kept.begin(asked(), "m")
    used(kept)
    full_disk.is_full = True
    await kept.flush()
    with pytest.raises(ApiError, match="cannot be written down") as refused:
        kept.begin(asked(), "m")
    assert (refused.value.word, refused.value.retry_after_s) == ("overloaded", 5)
    under_way.count(TOKENS)
    kept.end(under_way, "complete", 0.5)
    full_disk.is_full = False
    await kept.flush()
    assert kept.fault is None
    assert [row[:3] for row in rows(tmp_path)] == [ROW[:3]] * 2
    used(kept)
    await kept.close()
    assert len(rows(tmp_path)) == 3


async def test_where_it_is_to_serve_it_does_until_there_are_no_meters_and_restarts_lose_nothing(
    tmp_path: Path, full_disk: Any
) -> None:
    kept = ledger(tmp_path, when_failing="serve", max_unwritten=16)
    for _ in range(16):
        used(kept)
    await kept.flush()
    assert kept.fault is not None
    with pytest.raises(ApiError, match="cannot be written down"):
        kept.begin(asked(), "m")
    await kept.close()
    again = ledger(tmp_path, when_failing="serve", max_unwritten=16)
    assert again.num_unwritten == 16
    full_disk.is_full = False
    await again.close()
    assert rows(tmp_path) == [ROW] * 16


async def test_a_store_that_cannot_be_written_stops_the_start_by_its_reason(tmp_path: Path, full_disk: Any) -> None:
    with pytest.raises(ConfigError, match="disk is full"):
        ledger(tmp_path)
    full_disk.is_full = False
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        ledger(tmp_path / "file")
    (tmp_path / "usage.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        ledger(tmp_path)


async def test_a_database_that_is_deleted_under_the_router_is_made_again(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    used(kept)
    await kept.flush()
    for name in ("usage.sqlite", "usage.sqlite-wal", "usage.sqlite-shm"):
        os.unlink(tmp_path / name)
    used(kept)
    await kept.close()
    assert rows(tmp_path) == [ROW]


async def test_a_record_is_never_changed_or_deleted(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    used(kept)
    await kept.close()
    connection = sqlite3.connect(tmp_path / "usage.sqlite")
    for statement in ("DELETE FROM usage", "UPDATE usage SET cost = 0"):
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            connection.execute(statement)
    connection.close()


def test_sums_by_any_group_are_those_of_the_records(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.sqlite")
    day = 86_400.0
    records = [
        UsageRecord(
            MeteredRequest(str(i), "r", f"a{i % 2}", "k", f"m{i % 3}", i * day / 4),
            "ams1",
            i * day,
            "complete",
            UsedTokens(i, 0, 2 * i, 0),
            i,
        )
        for i in range(12)
    ]
    store.add(records)
    store.add(records[3:5])
    for by, groups in (
        ((), 1),
        (("account",), 2),
        (("account", "model"), 6),
        (("day",), 3),
        (("key", "site", "outcome"), 1),
    ):
        found = store.usage(UsageQuery(by=by))
        assert len(found) == groups
        assert sum(row["requests"] for row in found) == 12
        assert sum(row["prompt_tokens"] for row in found) == sum(row["cost"] for row in found) == 66
        assert sum(row["output_tokens"] for row in found) == 132
    (one,) = store.usage(UsageQuery(day, 2 * day, ("day",), "a0"))
    assert (one["day"], one["requests"], one["prompt_tokens"]) == ("1970-01-02", 2, 4 + 6)
    store.close()


async def test_a_clock_that_jumps_leaves_the_time_that_a_request_took(tmp_path: Path) -> None:
    now = time.time()
    kept = Ledger(LedgerConfig(), tmp_path, PRICES, lambda: now)
    meter = kept.begin(asked(), "m")
    meter.count(TOKENS)
    now -= 86_400
    kept.end(meter, "complete", 2.0)
    ((_, record),) = kept._ended
    assert record.ended_s == record.request.started_s + 2.0
    await kept.close()


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_router_that_restarts_knows_what_was_used_today_even_where_it_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    if is_failing:
        monkeypatch.setattr(UsageStore, "add", _refuse)
    kept = ledger(tmp_path, when_failing="serve")
    for _ in range(3):
        used(kept)
    await kept.close()
    again = ledger(tmp_path, when_failing="serve")
    assert again.used_since(time.time() + 60.0) == []
    rows = [row for row in again.used_since(0.0) if row["account"] == "acme"]
    assert sum(row["prompt_tokens"] + row["output_tokens"] for row in rows) == 3 * (TOKENS.prompt + TOKENS.output)
    quotas = DailyQuotas(time.time)
    Accounting(PRICES, again, quotas)
    assert quotas._used["acme"].tokens == 3 * (TOKENS.prompt + TOKENS.output)
    await again.close()


def _refuse(*_: Any) -> None:
    raise sqlite3.OperationalError("database or disk is full")
