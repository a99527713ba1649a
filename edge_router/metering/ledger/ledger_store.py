"""Stores of usage records: append-only tables.
This module has the common part; each kind has its own file.

A record is written once, however often writing is tried: its id is unique, and an existing row stays as it is. Used by one thread at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pilotlight.sites.config import ConfigError
from pilotlight.wire.hop.usage_records import UsageRecord

VERSION = 3  # version of a record
TEXTS = ("id", "request_id", "account", "key", "model", "site", "outcome", "adapter", "function")
COLUMNS = (
    "id", "request_id", "account", "key", "model", "site", "started_s", "ended_s", "outcome",
    "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost", "version",
    "adapter", "drafted_tokens", "accepted_tokens", "device_us", "bytes_in", "bytes_out", "function", "cpu_us",
)  # fmt: skip
SUMS = (
    "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "drafted_tokens", "accepted_tokens",
    "device_us", "bytes_in", "bytes_out", "cpu_us",
)  # fmt: skip
GROUPS = ("account", "key", "model", "adapter", "function", "site", "outcome", "day")
ONLY_ADDED = "usage is only added to"

Store = TypeVar("Store")


class UsageStoreError(Exception):
    """The store cannot be read or written at the moment; the message has the reason."""


class UsageQuery(NamedTuple):
    from_s: float = 0.0  # requests that began at this time or later, in seconds since the epoch
    to_s: float = 1e12
    by: tuple[str, ...] = ("account", "model")  # columns by which to group, of GROUPS
    account: str | None = None  # sums only this account's records; None for all accounts


class UsageStore(Protocol):
    def add(self, records: Sequence[UsageRecord]) -> None:
        """Write all records to disk, or none.
        Raises UsageStoreError; the same records may then be added again."""

    def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        """Return sums of records by the query's groups. Raises UsageStoreError."""

    def identity(self) -> str:
        """Return a name of this store's contents, different from that of all other stores.
        Raises UsageStoreError."""

    def interrupt(self) -> None:
        """Make the store operation of another thread fail."""

    def close(self) -> None: ...


def insertion(mark: str) -> str:
    """Return the statement that adds a record with the values of `row`.
    `mark` is the placeholder of a value."""
    marks = ", ".join([mark] * len(COLUMNS))
    return f"INSERT INTO usage ({', '.join(COLUMNS)}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING"


def row(record: UsageRecord) -> tuple[Any, ...]:
    request, use = record.request, record.use
    return (
        request.id, request.request_id, request.account, request.key, request.model, record.site, request.started_s, record.ended_s,
        record.outcome, *use[:4], record.cost, VERSION,
        request.adapter, use.drafted, use.accepted, use.device_us, request.bytes_in, record.bytes_out, request.function, record.cpu_us,
    )  # fmt: skip


def selection(query: UsageQuery, day: str, mark: str) -> tuple[str, list[float | str]]:
    """Return the statement that sums records, and its values.
    `day` is the store's SQL for the date of `started_s`."""
    groups = [f"{day if name == 'day' else name} AS {name}" for name in query.by]
    sums = [f"CAST(COALESCE(SUM({name}), 0) AS BIGINT) AS {name}" for name in SUMS]
    chosen = ", ".join([*groups, "COUNT(*) AS requests", *sums, "CAST(SUM(cost) AS BIGINT) AS cost"])
    where = f"started_s >= {mark} AND started_s < {mark}"
    values: list[float | str] = [query.from_s, query.to_s]
    if query.account is not None:
        where += f" AND account = {mark}"
        values.append(query.account)
    order = ", ".join(str(i + 1) for i in range(len(query.by)))
    behind = f" GROUP BY {order} ORDER BY {order}" if query.by else ""
    return f"SELECT {chosen} FROM usage WHERE {where}{behind}", values


def configured(key: str, made: Callable[[], Store]) -> Store:
    """Return the store for a key of the router's file. `made` creates it and imports its modules.
    Raises ConfigError."""
    try:
        return made()
    except ImportError as error:
        raise ConfigError(f"{key} needs pip install 'pilotlight-inference[postgres]': {error}") from None
    except UsageStoreError as error:
        raise ConfigError(f"{key} is not a database URL: {error}") from None
