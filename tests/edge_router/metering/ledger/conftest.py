"""Fixtures of a ledger: its directory, and a store of each kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from load_tests.postgres import Postgres
from pilotlight.edge_router.metering.ledger.ledger import Ledger, LedgerTimings
from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery, UsageStore, UsageStoreError
from pilotlight.edge_router.metering.ledger.postgres_store import PostgresStore
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.metering.ledger.sqlite_store import SqliteStore
from pilotlight.sites.network import LedgerConfig, PriceConfig
from pilotlight.wire.hop.usage_records import UsageRecord

PRICES = PriceList([PriceConfig(model="m", input=1.0, cached_input=0.0, output=2.0)], "USD")


class Place(NamedTuple):
    directory: Path
    url: str | None = None  # None for a SQLite file in the directory

    def ledger(self, timings: LedgerTimings | None = None, store: UsageStore | None = None, **config: Any) -> Ledger:
        return Ledger(LedgerConfig(store=self.url, **config), self.directory, PRICES, timings=timings, store=store)

    def store(self) -> UsageStore:
        return SqliteStore(self.directory / "usage.sqlite") if self.url is None else PostgresStore(self.url)


class FailingStore(UsageStore):
    """A store that another one serves, as long as it does not fail."""

    def __init__(self, store: UsageStore, *, writes: bool = True, reads: bool = True) -> None:
        self.store = store
        self.writes, self.reads = writes, reads
        self.is_confirming = True  # whether a write is reported as done
        self.num_failed = 0
        self.records: list[UsageRecord] = []  # everything that was written

    def add(self, records: Sequence[UsageRecord]) -> None:
        if self.writes:
            self.store.add(records)
            self.records += records
        if not (self.writes and self.is_confirming):
            self.num_failed += 1
            raise UsageStoreError("database or disk is full")

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        if not self.reads:
            raise UsageStoreError("database or disk is full")
        return self.store.usage(query)

    def identity(self) -> str:
        return self.store.identity()

    def interrupt(self) -> None:
        self.store.interrupt()

    def close(self) -> None:
        self.store.close()


def empty(server: Postgres) -> Postgres:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS usage")
    return server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.network)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(tmp_path)
    return Place(tmp_path, empty(request.getfixturevalue("postgres")).url)
