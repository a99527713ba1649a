"""Usage records in a PostgreSQL database, which the routers of a network may share."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from edge_router.ledger.records import UsageRecord
from edge_router.ledger.store import (
    COLUMNS,
    MORE,
    ONLY_ADDED,
    TEXTS,
    UsageQuery,
    UsageStoreError,
    insertion,
    row,
    selection,
)

CONNECT_S = 5
# A database whose machine is gone is noticed after some twenty seconds; what the URL says goes before.
_DEFAULTS = {
    "connect_timeout": CONNECT_S, "keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 20_000,
    "application_name": "pilotlight",
}  # fmt: skip
_LOCK = 0x70696C6F7400  # for one router at a time that makes the table
_DAY = "to_char(to_timestamp(started_s) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
_ADD = insertion("%s")


class PostgresStore:
    def __init__(self, url: str) -> None:
        """Raises UsageStoreError for what is no URL of a database."""
        try:
            given: dict[str, Any] = conninfo_to_dict(url)
            self._conninfo = make_conninfo(**{**_DEFAULTS, **given})
        except psycopg.ProgrammingError as error:
            raise UsageStoreError(str(error).strip()) from None
        self._connection: psycopg.Connection[dict[str, Any]] | None = None

    def add(self, records: Sequence[UsageRecord]) -> None:
        with self._working() as connection, connection.transaction():
            connection.cursor().executemany(_ADD, [tuple(map(_plain, row(record))) for record in records])

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        with self._working() as connection:
            return connection.execute(*selection(query, _DAY, "%s")).fetchall()

    def interrupt(self) -> None:
        """End the connection under the thread that waits: a database that was stopped answers no request to cancel."""
        if (connection := self._connection) is None:
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.Error):
            pass  # it has ended

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _working(self) -> Iterator["psycopg.Connection[dict[str, Any]]"]:
        """Yield a connection. Raises UsageStoreError; the next one is then another, as a database that comes back knows none of the old ones."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._conninfo, autocommit=True, row_factory=dict_row)
                _bring_up_to_date(self._connection)
            yield self._connection
        except (psycopg.Error, OSError) as error:
            self.close()
            raise UsageStoreError(" ".join(str(error).split()) or type(error).__name__) from None


def _bring_up_to_date(connection: "psycopg.Connection[dict[str, Any]]") -> None:
    """Make the table, or what it lacks; where there is nothing to do, nobody needs the right to."""
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
        first = ", ".join(f"{name} {kinds.get(name, counts)}" for name in COLUMNS if name not in MORE)
        more = ", ".join(
            f"ADD COLUMN IF NOT EXISTS {name} " + (f"{text} DEFAULT ''" if name == "adapter" else f"{counts} DEFAULT 0")
            for name in MORE
        )
        for statement in (
            f"CREATE TABLE IF NOT EXISTS usage ({first})",
            f"ALTER TABLE usage {more}",
            "CREATE INDEX IF NOT EXISTS usage_started ON usage (started_s)",
            "CREATE OR REPLACE FUNCTION usage_is_kept() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{ONLY_ADDED}'; END $$",
            "CREATE OR REPLACE TRIGGER usage_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON usage "
            "FOR EACH STATEMENT EXECUTE FUNCTION usage_is_kept()",
        ):
            connection.execute(statement)


def _plain(value: Any) -> Any:
    """Return a value that a column can hold: PostgreSQL's texts have no zero, and a model's name is a client's word."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
