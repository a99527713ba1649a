"""Limits of several routers in a database: the shared arithmetic, expiry, and writes that happen whole or not at all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from load_tests.postgres import Postgres
from pilotlight.edge_router.admission.quotas.lease_store import EXPIRES_S, LeaseClaim, LeaseGrant, LeaseKey
from pilotlight.edge_router.admission.quotas.postgres_leases import KEPT_S, PostgresLeases
from pilotlight.edge_router.admission.quotas.shared import shared_quotas
from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import QuotasConfig
from tests.edge_router.builders import Clock

DAY, MINUTE = LeaseKey("acme", "tokens_per_day", 7), LeaseKey("acme", "tokens_per_minute")


def claim(key: LeaseKey = DAY, **more: float) -> LeaseClaim:
    """Return a claim for a limit of 100 of which nothing is used."""
    values = {"capacity": 100.0, "per_s": 0.0, "before": 0.0, "spent": 0.0, "at_work": 0.0, "spare": 0.0, **more}
    return LeaseClaim(key, **values)


@pytest.fixture
def database(postgres: Postgres) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS quota_use, quota_leases")
        yield connection


@pytest.fixture
def leases(database: psycopg.Connection, postgres: Postgres) -> Iterator[PostgresLeases]:
    store = PostgresLeases(postgres.url)
    yield store
    store.close()


def test_what_is_used_and_lent_at_all_routers_comes_to_the_limit(leases: PostgresLeases) -> None:
    assert leases.exchange("a", [claim(before=20, spent=5, spare=30)]) == [LeaseGrant(30, 45)]
    assert leases.exchange("b", [claim(before=20, spent=5, at_work=10, spare=50)]) == [LeaseGrant(40, 0)], (
        "the earlier 20 count once"
    )
    assert leases.exchange("a", [claim(spent=10, spare=30)]) == [LeaseGrant(20, 0)], "its own lease is not free"
    assert leases.exchange("b", [claim()]) == [LeaseGrant(0, 40)], "the lease was returned"
    assert leases.exchange("a", [claim(spare=60)]) == [LeaseGrant(60, 0)]


def test_limits_of_other_accounts_names_and_days_are_their_own(leases: PostgresLeases) -> None:
    others = [DAY._replace(account="other"), DAY._replace(limit="cost_per_day"), DAY._replace(period=8)]
    leases.exchange("a", [claim(spent=90, spare=10)])
    assert leases.exchange("b", [claim(key, spare=100) for key in (*others, DAY)]) == [
        *[LeaseGrant(100, 0)] * 3, LeaseGrant(0, 0),
    ], "grants are in the order of the claims"  # fmt: skip


def test_a_minutes_limit_leaks_away_by_the_databases_clock_and_never_below_nothing(
    leases: PostgresLeases, database: psycopg.Connection
) -> None:
    leases.exchange("a", [claim(MINUTE, per_s=2, spent=60)])
    database.execute("UPDATE quota_use SET at_s = at_s - 10")
    (grant,) = leases.exchange("a", [claim(MINUTE, per_s=2)])
    assert grant.free == pytest.approx(100 - 60 + 20, abs=2)
    database.execute("UPDATE quota_use SET at_s = at_s + 1000")  # the clock was set back
    (grant,) = leases.exchange("a", [claim(MINUTE, per_s=2)])
    assert grant.free == pytest.approx(60, abs=2)
    database.execute("UPDATE quota_use SET at_s = at_s - 1000")
    assert leases.exchange("a", [claim(MINUTE, per_s=2, spent=1)]) == [LeaseGrant(0, 99)]


def test_a_lease_that_its_router_does_not_confirm_is_given_to_others(
    leases: PostgresLeases, database: psycopg.Connection
) -> None:
    leases.exchange("dead", [claim(spare=70)])
    database.execute(f"UPDATE quota_leases SET seen_s = seen_s - {EXPIRES_S - 2}")
    assert leases.exchange("a", [claim(spare=100)]) == [LeaseGrant(30, 0)]
    database.execute(f"UPDATE quota_leases SET seen_s = seen_s - {EXPIRES_S} WHERE router = 'dead'")
    assert leases.exchange("a", [claim(spare=100)]) == [LeaseGrant(100, 0)]


def test_claims_are_taken_down_all_or_none(leases: PostgresLeases) -> None:
    with pytest.raises(UsageStoreError):
        leases.exchange("a", [claim(spent=50), claim(DAY._replace(account="zero \0"), spent=50)])
    assert leases.exchange("a", [claim(spare=100)]) == [LeaseGrant(100, 0)]


def test_unused_entries_are_forgotten_after_days_when_a_router_starts(
    leases: PostgresLeases, database: psycopg.Connection, postgres: Postgres
) -> None:
    for key in (DAY, MINUTE):
        leases.exchange("a", [claim(key, spent=1, spare=1)])
    for table, column in (("quota_use", "at_s"), ("quota_leases", "seen_s")):
        database.execute(f"UPDATE {table} SET {column} = {column} - {KEPT_S - 60}")
        database.execute(f"UPDATE {table} SET {column} = {column} - 120 WHERE limit_name = %s", [MINUTE.limit])
    started = PostgresLeases(postgres.url)
    started.exchange("b", [])
    started.close()
    for table in ("quota_use", "quota_leases"):
        assert database.execute(f"SELECT limit_name FROM {table}").fetchall() == [(DAY.limit,)]


def test_routers_that_start_at_once_make_one_table(database: psycopg.Connection, postgres: Postgres) -> None:
    stores = [PostgresLeases(postgres.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda numbered: numbered[1].exchange(str(numbered[0]), [claim(spent=1)]), enumerate(stores)))
    assert stores[0].exchange("0", [claim()]) == [LeaseGrant(0, 96)]
    for store in stores:
        store.close()


async def test_routers_share_what_their_files_say_they_do() -> None:
    assert shared_quotas(QuotasConfig(), Clock()) is None
    with pytest.raises(ConfigError, match="not a database URL"):
        shared_quotas(QuotasConfig(store="postgresql://a@b/c?colour=red"), Clock())
    made = shared_quotas(QuotasConfig(store="postgresql://a@b/c"), Clock())
    assert made is not None
    await made.close()
