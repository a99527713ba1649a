"""Fixtures of a ledger: its directory, and a store of each kind."""

from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from load_tests.postgres import Postgres
from pilotlight.edge_router.metering.ledger.ledger import Ledger, LedgerTimings
from pilotlight.edge_router.metering.ledger.ledger_store import UsageStore
from pilotlight.edge_router.metering.ledger.postgres_store import PostgresStore
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.metering.ledger.sqlite_store import SqliteStore
from pilotlight.sites.network import LedgerConfig, PriceConfig

PRICES = PriceList([PriceConfig(model="m", input=1.0, cached_input=0.0, output=2.0)], "USD")


class Place(NamedTuple):
    directory: Path
    url: str | None = None  # None for a SQLite file in the directory

    def ledger(self, timings: LedgerTimings | None = None, **config: Any) -> Ledger:
        return Ledger(LedgerConfig(store=self.url, **config), self.directory, PRICES, timings=timings)

    def store(self) -> UsageStore:
        return SqliteStore(self.directory / "usage.sqlite") if self.url is None else PostgresStore(self.url)

    @property
    def kind(self) -> type[UsageStore]:
        return SqliteStore if self.url is None else PostgresStore


def empty(server: Postgres) -> Postgres:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS usage")
    return server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.network)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(tmp_path)
    return Place(tmp_path, empty(request.getfixturevalue("postgres")).url)
