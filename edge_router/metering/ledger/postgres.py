"""A connection to a PostgreSQL database that may go away and come back. Used by one thread at a time."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError

CONNECT_S = 5
# A lost database server is noticed after some twenty seconds; settings in the URL override this.
_DEFAULTS = {
    "connect_timeout": CONNECT_S, "keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 20_000,
    "application_name": "pilotlight",
}  # fmt: skip

Connection = psycopg.Connection[dict[str, Any]]


class PostgresDatabase:
    def __init__(self, url: str, prepare: Callable[[Connection], None]) -> None:
        """`prepare` updates the tables on each new connection.
        Raises UsageStoreError for an invalid database URL."""
        try:
            given: dict[str, Any] = conninfo_to_dict(url)
            self._conninfo = make_conninfo(**{**_DEFAULTS, **given})
        except psycopg.ProgrammingError as error:
            # psycopg's message may quote any part of the URL, even its password: drop everything after the first quotation mark.
            raise UsageStoreError(str(error).partition('"')[0].strip(" :\n")) from None
        if "@" in str(given.get("host", "")):
            raise UsageStoreError("it has two @: write one of a name or password as %40")
        self._prepare = prepare
        self._connection: Connection | None = None

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @contextmanager
    def working(self) -> Iterator[Connection]:
        """Yield a connection. After UsageStoreError the next one is new: a restarted database drops old ones."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._conninfo, autocommit=True, row_factory=dict_row)
                self._prepare(self._connection)
            yield self._connection
        except (psycopg.Error, OSError) as error:
            self.close()
            raise UsageStoreError(" ".join(str(error).split()) or type(error).__name__) from None

    def interrupt(self) -> None:
        """Close the connection that another thread waits for: a stopped database answers no cancel request."""
        if (connection := self._connection) is None:
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.Error):
            pass  # the connection has ended already

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
