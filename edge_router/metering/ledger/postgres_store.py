"""Usage records in a PostgreSQL database, which the routers of a network may share."""

from collections.abc import Sequence
from typing import Any

from pilotlight.edge_router.metering.ledger.ledger_store import (
    COLUMNS,
    ONLY_ADDED,
    TEXTS,
    UsageQuery,
    insertion,
    row,
    selection,
)
from pilotlight.edge_router.metering.ledger.postgres import Connection, PostgresDatabase
from pilotlight.wire.hop.usage_records import UsageRecord

_LOCK = 0x70696C6F7400  # advisory lock: one router at a time creates the table
_DAY = "to_char(to_timestamp(started_s) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_ADD = insertion("%s")


class PostgresStore(PostgresDatabase):
    def __init__(self, url: str) -> None:
        """Raises UsageStoreError for an invalid database URL."""
        super().__init__(url, _make_tables)

    def add(self, records: Sequence[UsageRecord]) -> None:
        with self.working() as connection, connection.transaction():
            connection.cursor().executemany(_ADD, [tuple(map(_plain, row(record))) for record in records])

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        with self.working() as connection:
            return connection.execute(*selection(query, _DAY, "%s")).fetchall()

    def identity(self) -> str:
        with self.working() as connection:
            found = connection.execute("SELECT id FROM usage_identity").fetchone()
            assert found is not None
            return str(found["id"])


def _make_tables(connection: Connection) -> None:
    """Create the tables if they do not exist, so that no right to create them is needed later."""
    found = connection.execute("SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('usage')")
    if set(COLUMNS) <= {each["attname"] for each in found}:
        return
    text, counts = 'TEXT COLLATE "C" NOT NULL', "BIGINT NOT NULL"
    kinds = {name: text for name in TEXTS} | {
        "started_s": "DOUBLE PRECISION NOT NULL",
        "ended_s": "DOUBLE PRECISION NOT NULL",
    }
    kinds |= {"id": 'TEXT COLLATE "C" PRIMARY KEY', "cost": "BIGINT"}
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        columns = ", ".join(f"{name} {kinds.get(name, counts)}" for name in COLUMNS)
        for statement in (
            f"CREATE TABLE IF NOT EXISTS usage ({columns})",
            "CREATE INDEX IF NOT EXISTS usage_started ON usage (started_s)",
            "CREATE TABLE IF NOT EXISTS usage_identity (id TEXT NOT NULL)",
            "INSERT INTO usage_identity SELECT gen_random_uuid()::TEXT WHERE NOT EXISTS (SELECT * FROM usage_identity)",
            "CREATE OR REPLACE FUNCTION usage_is_kept() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{ONLY_ADDED}'; END $$",
            "CREATE OR REPLACE TRIGGER usage_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON usage "
            "FOR EACH STATEMENT EXECUTE FUNCTION usage_is_kept()",
        ):
            connection.execute(statement)


def _plain(value: Any) -> Any:
    """Return a value that a column can store.

    PostgreSQL's texts cannot contain zero bytes, and clients choose model names.
    """
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
