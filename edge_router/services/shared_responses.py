"""Stored responses in a PostgreSQL database that the routers of a network share.

`response_store/response_rows.py` defines the rows for both kinds of database. Writers exclude each other, as in SQLite, so a transaction that makes
room or deletes expired rows sees all that others have written. Each reader sees a snapshot.
"""

import asyncio
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
import psycopg
from psycopg.rows import tuple_row

from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError
from pilotlight.edge_router.metering.ledger.postgres import Connection, PostgresDatabase
from pilotlight.response_store import response_rows as rows
from pilotlight.response_store.response_database import ResponsesFault, Result, Work
from pilotlight.support.time_limits import done_within

CLOSES_WITHIN_S = 2.0
WRITERS_LOCK = 0x70696C6F7402  # advisory lock: one writer at a time
_MAKES_TABLES = 0x70696C6F7403
_NOW = "EXTRACT(EPOCH FROM statement_timestamp())::DOUBLE PRECISION"
_TRIGGERS = (
    """CREATE OR REPLACE FUNCTION response_counted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO response_tenants AS known VALUES (NEW.tenant, NEW.num_bytes)
            ON CONFLICT (tenant) DO UPDATE SET num_bytes = known.num_bytes + excluded.num_bytes;
        ELSIF TG_OP = 'UPDATE' THEN
            UPDATE response_tenants SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes WHERE tenant = NEW.tenant;
        ELSE
            UPDATE response_tenants SET num_bytes = num_bytes - OLD.num_bytes WHERE tenant = OLD.tenant;
            DELETE FROM response_tenants WHERE tenant = OLD.tenant AND num_bytes <= 0;
        END IF;
        RETURN NULL;
    END $$""",
    """CREATE OR REPLACE TRIGGER response_counted AFTER INSERT OR UPDATE OR DELETE ON responses
        FOR EACH ROW EXECUTE FUNCTION response_counted()""",
)


class WriterLimits(NamedTuple):
    turn_within_s: float = 3.0  # wait for the end of the previous writer
    stands_still_s: float = 3.0  # an idle transaction of a writer is aborted after this time

    @property
    def statement(self) -> bytes:
        """Return the statement that begins a writer's turn."""
        return f"""SELECT set_config('lock_timeout', '{self.turn_within_s:.0f}s', TRUE),
            set_config('idle_in_transaction_session_timeout', '{self.stands_still_s:.0f}s', TRUE), pg_advisory_xact_lock({WRITERS_LOCK})""".encode()


class PostgresResponses:
    """Stored responses in PostgreSQL. Work runs in a thread; callers wait at most `within_s`."""

    is_shared = True
    name = "the routers' database"

    def __init__(self, url: str, limits: WriterLimits | None = None) -> None:
        """Raises UsageStoreError for an invalid database URL."""
        self._turn = (limits or WriterLimits()).statement
        self._database = PostgresDatabase(url, _make_tables)
        self._thread = ThreadPoolExecutor(1, "responses")
        self._is_closed = False

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        if self._is_closed:
            raise ResponsesFault("this router has stopped")
        job, loop = _TimedWork(work, is_write), asyncio.get_running_loop()
        doing = loop.run_in_executor(self._thread, self._do, job)
        doing.add_done_callback(_heard)
        # a task, because the work must be stopped in time even if the caller is cancelled before
        if not await asyncio.shield(loop.create_task(self._ended(doing, job, within_s))):
            raise ResponsesFault(f"no answer within {within_s:g} s", "their database did not answer in time")
        try:
            result: Result = doing.result()
        except (UsageStoreError, orjson.JSONDecodeError, zlib.error) as error:
            raise ResponsesFault(str(error), "their database cannot be used") from None
        return result

    async def tidy(self, keep_s: float) -> None:
        """Do nothing: the database has no files beside it."""

    async def close(self) -> None:
        self._is_closed = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        if not (await asyncio.wait({closing}, timeout=CLOSES_WITHIN_S))[0]:
            self._database.interrupt()
        self._thread.shutdown(wait=False)

    async def _ended(self, doing: "asyncio.Future[Any]", job: "_TimedWork", within_s: float) -> bool:
        """Return whether the work ends in time; otherwise stop it."""
        if not (is_in_time := await done_within(within_s, doing)):
            job.is_left = True
            if job.is_running:
                self._database.interrupt()
        return is_in_time

    def _do(self, job: "_TimedWork") -> Any:
        if job.is_left:
            raise UsageStoreError("the caller has gone")
        job.is_running = True
        was_open = self._database.is_open
        try:
            return self._in_transaction(job)
        except UsageStoreError:
            if job.is_left or not was_open:
                raise
            return self._in_transaction(job)  # again, on a new connection: a restarted database has dropped the old one
        finally:
            job.is_running = False

    def _in_transaction(self, job: "_TimedWork") -> Any:
        with self._database.working() as connection:
            connection.isolation_level = None if job.is_write else psycopg.IsolationLevel.REPEATABLE_READ
            with connection.transaction():
                if job.is_write:
                    connection.execute(self._turn)
                return job.work(TranslatedConnection(connection))


class TranslatedConnection:
    """A connection with the interface that the functions of `response_store/response_rows.py` use."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> "psycopg.Cursor[tuple[Any, ...]]":
        cursor = self._connection.cursor(row_factory=tuple_row)
        # Texts in PostgreSQL cannot contain zero characters, and a client may choose an id.
        plain = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
        return cursor.execute(_translated(sql), plain)


class _TimedWork:
    def __init__(self, work: Work[Any], is_write: bool) -> None:
        self.work = work
        self.is_write = is_write
        self.is_left = False
        self.is_running = False


@lru_cache(256)
def _translated(sql: str) -> bytes:
    return sql.replace("?", "%s").replace("now_s()", _NOW).encode()


def _make_tables(connection: Connection) -> None:
    """Create the tables if they do not exist, so that no right to create them is needed later."""
    chosen = "SELECT to_regclass('response_requests') IS NOT NULL AS is_there"  # the table that is created last
    if _is_there(connection.execute(chosen).fetchone()):
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKES_TABLES])
        if not _is_there(connection.execute(chosen).fetchone()):
            tables = rows.schema("BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "BYTEA")
            for statement in (*tables.split(";"), *_TRIGGERS):
                connection.execute(statement.encode())


def _is_there(row: dict[str, Any] | None) -> bool:
    return row is not None and bool(row["is_there"])


def _heard(doing: "asyncio.Future[Any]") -> None:
    if not doing.cancelled():
        doing.exception()  # retrieve it, even if the caller has left
