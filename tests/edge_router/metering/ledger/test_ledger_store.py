"""Stores of usage records, of both kinds: sums, unchangeable records, and tables of the previous version."""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from load_tests.postgres import Postgres
from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery, UsageStoreError
from pilotlight.edge_router.metering.ledger.postgres_store import PostgresStore
from pilotlight.edge_router.metering.ledger.sqlite_store import SqliteStore
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, UsageRecord
from tests.edge_router.metering.ledger.conftest import Place, empty

DAY_S = 86_400.0


def record(i: int, **more: str) -> UsageRecord:
    named = {
        "account": f"a{i % 2}",
        "model": f"m{i % 3}",
        "adapter": "french" if i % 4 == 0 else "",
        "function": "f" if i % 3 == 0 else "",
        **more,
    }
    request = MeteredRequest(str(i), "r", key="k", started_s=i * DAY_S / 4, bytes_in=100 + i, **named)
    return UsageRecord(
        request, "ams1", i * DAY_S, "complete", ResourceUse(i, 0, 2 * i, 1, 3, 2, 10**12), 1000 + i, i, 7
    )


def test_sums_by_any_group_are_those_of_the_records(place: Place) -> None:
    store = place.store()
    records = [record(i) for i in range(12)]
    store.add(records)
    store.add(records[3:5])
    for by, groups in (
        ((), 1),
        (("account",), 2),
        (("account", "model"), 6),
        (("adapter",), 2),
        (("function",), 2),
        (("day",), 3),
        (("key", "site", "outcome"), 1),
    ):
        found = store.usage(UsageQuery(by=by))
        assert len(found) == groups
        sums = {name: sum(row[name] for row in found) for name in found[0] if name not in by}
        assert sums == {
            "requests": 12, "prompt_tokens": 66, "cached_tokens": 0, "output_tokens": 132, "reasoning_tokens": 12, "drafted_tokens": 36,
            "accepted_tokens": 24, "device_us": 12 * 10**12, "bytes_in": 1266, "bytes_out": 12_066, "cpu_us": 84, "cost": 66,
        }  # fmt: skip
        assert all(type(value) is int for row in found for name, value in row.items() if name not in by)
    (one,) = store.usage(UsageQuery(DAY_S, 2 * DAY_S, ("day",), "a0"))
    assert (one["day"], one["requests"], one["prompt_tokens"]) == ("1970-01-02", 2, 4 + 6)
    assert store.usage(UsageQuery(account="nobody")) == []
    days = [store.usage(UsageQuery(day * DAY_S, (day + 1) * DAY_S, ()))[0]["requests"] for day in range(4)]
    assert days == [4, 4, 4, 0], "a request that starts at midnight belongs to one day"
    store.close()


def test_a_record_is_never_changed_or_deleted(place: Place) -> None:
    store = place.store()
    store.add([record(1)])
    store.close()
    for statement in ("DELETE FROM usage", "UPDATE usage SET cost = 0"):
        if place.url is None:
            connection = sqlite3.connect(place.directory / "usage.sqlite")
            with pytest.raises(sqlite3.IntegrityError, match="only added to"):
                connection.execute(statement)
            connection.close()
        else:
            with (
                psycopg.connect(place.url) as asking,
                pytest.raises(psycopg.errors.RaiseException, match="only added to"),
            ):
                asking.execute(statement)


def test_names_that_clients_make_up_are_kept(place: Place) -> None:
    store = place.store()
    store.add([record(1, model="nul \0 and \N{SNOWMAN} and ' and %s", account="")])
    (row,) = store.usage(UsageQuery())
    assert row["model"].startswith("nul ")
    assert row["model"].endswith(" and \N{SNOWMAN} and ' and %s")
    store.close()


def test_routers_that_start_at_once_make_one_table(tmp_path: Path, postgres: Postgres) -> None:
    stores = [Place(tmp_path, empty(postgres).url).store() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda numbered: numbered[1].add([record(numbered[0]), record(9)]), enumerate(stores)))
    (row,) = stores[0].usage(UsageQuery(by=()))
    assert row["requests"] == 5
    for store in stores:
        store.close()


ENDLESS = """ALTER TABLE usage RENAME TO finite;
CREATE VIEW usage AS WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT 1 FROM numbers) SELECT finite.* FROM finite, numbers"""
FINITE = "DROP VIEW usage; ALTER TABLE finite RENAME TO usage"


def test_a_question_that_takes_too_long_is_interrupted_and_the_next_one_answered(tmp_path: Path) -> None:
    store = Place(tmp_path).store()
    assert isinstance(store, SqliteStore)
    store.interrupt()  # without effect, because no operation runs
    store.add([record(1)])
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as other, ThreadPoolExecutor(1) as thread:
        other.executescript(ENDLESS)
        asking = thread.submit(store.usage, UsageQuery())
        while not asking.done():
            store.interrupt()
            time.sleep(0.001)
        with pytest.raises(UsageStoreError, match="interrupted"):
            asking.result()
        other.executescript(FINITE)
    assert len(store.usage(UsageQuery())) == 1
    store.close()


def test_a_store_that_is_closed_leaves_one_file(tmp_path: Path) -> None:
    store = Place(tmp_path).store()
    store.add([record(1)])
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["usage.sqlite"]
    store.close()


@pytest.mark.parametrize(
    "url", ["//u:sec%ret@h/d", "//u:secret@[h/d", "//u:se@cret@h/d", '//u:se"c%ret@h/d', "//u:secret@h/d?a=b"]
)
def test_an_error_in_a_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(UsageStoreError) as refused:
        PostgresStore(f"postgresql:{url}").usage(UsageQuery())
    assert "ret" not in str(refused.value)
    assert str(refused.value)[-1].isalnum()
