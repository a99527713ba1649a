"""KV: keys, values, metadata and expiry, in one SQLite file for each namespace.

Limits are the platform's documented ones. Keys are compared as UTF-8 bytes, which is also the order of a list. A read never returns an expired key;
writes delete expired keys a few at a time.
"""

import base64
import binascii
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pilotlight.functions.bindings.binding import (
    Binding,
    BindingError,
    BindingLimits,
    Body,
    MemoryBudget,
    Pieces,
    Services,
    gathered,
    method,
)
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import Connection, Database, prefix_end, storage_word, transaction

MAX_KEY_BYTES = 512
MAX_METADATA_BYTES = 1024
MAX_LISTED = 1000
MAX_BULK_KEYS = 100
MIN_TTL_S = 60
MIN_CACHE_TTL_S = 30
SWEEP_EVERY_S = 60.0
SWEPT_AT_ONCE = 500

# The value is the last column: to read a column that follows 25 MiB, SQLite walks all its pages.
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY NOT NULL, expires_s INTEGER, metadata TEXT, value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS entries_by_expiry ON entries (expires_s) WHERE expires_s IS NOT NULL;
"""
_LIVE = "(expires_s IS NULL OR expires_s > ?)"

T = TypeVar("T")


class KVGet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    streamed: bool = False
    cache_ttl: int | None = None


class KVGetMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[str]
    cache_ttl: int | None = None


class KVPut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: bytes | None = None  # None if the value is streamed
    expiration: int | None = None  # Unix time in seconds
    expiration_ttl: int | None = None
    metadata: str | None = None  # JSON


class KVDelete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class KVList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: str = ""
    limit: Annotated[int, Meta(ge=-(2**53), le=2**53)] = MAX_LISTED
    cursor: str | None = None


class KVNamespace(Binding):
    kind = "kv"

    def __init__(
        self,
        database: Database,
        now_s: Callable[[], float] = time.time,
        memory: MemoryBudget | None = None,
        max_bytes: int = BindingLimits.kv_value_bytes,
    ) -> None:
        """`max_bytes` is the largest size of a value."""
        self._database = database
        self._memory = memory or MemoryBudget()
        self._now_s = now_s
        self._swept_at_s = 0.0
        self._max_bytes = max_bytes

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "KVNamespace":
        path = directory_of(state_dir, "kv", declaration.options.get("id") or declaration.name) / "entries.sqlite"
        return cls(
            services.database(path, SCHEMA), services.clock.now_s, services.memory, services.limits.kv_value_bytes
        )

    @method
    async def get(self, request: KVGet) -> Any:
        """Return {found, metadata} of a key, with the value either as `value` or as a stream."""
        key = _checked_key("GET", request.key)
        _check_cache_ttl(request.cache_ttl)
        row = await self._run("GET", lambda connection: self._row(connection, key))
        if row is None:
            return {"found": False}
        metadata, value = row
        if request.streamed:
            return StreamingReply({"found": True, "metadata": metadata}, Pieces(value, self._memory.hold()))
        return {"found": True, "metadata": metadata, "value": value}

    @method
    async def get_many(self, request: KVGetMany) -> Any:
        """Return [value, metadata] of each key, or None where a key does not exist."""
        if not 1 <= len(request.keys) <= MAX_BULK_KEYS:
            raise _refusal("GET", 400, f"You can request a maximum of {MAX_BULK_KEYS} keys, and at least one.")
        _check_cache_ttl(request.cache_ttl)
        keys = [_checked_key("GET", key) for key in request.keys]

        def read(connection: Connection) -> list[list[Any] | None]:
            rows: list[list[Any] | None] = []
            size = 0
            for key in keys:
                row = self._row(connection, key)
                rows.append(None if row is None else [row[1], row[0]])
                size += 0 if row is None else len(row[1])
                if size > self._max_bytes:
                    sentence = (
                        f"Total size of request exceeds the limit of {self._max_bytes} bytes; ask for fewer keys."
                    )
                    raise _refusal("GET", 413, sentence)
            return rows

        return await self._run("GET", read)

    @method
    async def put(self, request: KVPut, body: Body | None) -> None:
        key = _checked_key("PUT", request.key)
        expires_s = self._expiry(request)
        _check_metadata(request.metadata)
        if request.value is None and body is None:
            raise BindingError("KV PUT failed: there is neither a value nor a stream", name="TypeError")
        with self._memory.hold() as held:
            value = request.value
            if value is None:
                assert body is not None
                value = await gathered(body, self._max_bytes, self._too_long, held)
            if len(value) > self._max_bytes:
                raise self._too_long(len(value))
            await self._write((key, expires_s, request.metadata, value))

    @method
    async def delete(self, request: KVDelete) -> None:
        key = _checked_key("DELETE", request.key)
        await self._run(
            "DELETE", lambda connection: connection.execute("DELETE FROM entries WHERE key = ?", (key,)).close()
        )

    @method
    async def list(self, request: KVList) -> Any:
        """List keys: {keys: [[name, expires_s, metadata]...], cursor}; the last page has no cursor."""
        if not 1 <= request.limit <= MAX_LISTED:
            sentence = f"Invalid key_count_limit of {request.limit}. Please specify an integer from 1 to {MAX_LISTED}."
            raise _refusal("GET", 400, sentence)
        prefix = _encoded("GET", request.prefix)
        if len(prefix) > MAX_KEY_BYTES:
            raise _refusal(
                "GET", 414, f"UTF-8 encoded length of {len(prefix)} exceeds key length limit of {MAX_KEY_BYTES}."
            )
        after = _decoded_cursor(request.cursor) if request.cursor else None
        conditions, parameters = [_LIVE, "key >= ?"], [int(self._now_s()), prefix]
        if (end := prefix_end(prefix)) is not None:
            conditions.append("key < ?")
            parameters.append(end)
        if after is not None:
            conditions.append("key > ?")
            parameters.append(after)
        query = f"SELECT key, expires_s, metadata FROM entries WHERE {' AND '.join(conditions)} ORDER BY key LIMIT ?"
        parameters.append(request.limit + 1)
        rows = await self._run("GET", lambda connection: connection.execute(query, parameters).fetchall())
        shown = rows[: request.limit]
        listed: dict[str, Any] = {"keys": [[key.decode(), expires_s, metadata] for key, expires_s, metadata in shown]}
        if len(rows) > len(shown):
            listed["cursor"] = base64.urlsafe_b64encode(shown[-1][0]).decode()
        return listed

    async def _write(self, row: tuple[Any, ...]) -> None:
        def write(connection: Connection) -> None:
            with transaction(connection):
                connection.execute(
                    "INSERT OR REPLACE INTO entries (key, expires_s, metadata, value) VALUES (?, ?, ?, ?)", row
                )
                self._sweep(connection)

        await self._run("PUT", write)

    async def _run(self, verb: str, work: Callable[[Connection], T]) -> T:
        try:
            return await self._database.run(work)
        except Exception as error:
            if (word := storage_word(error)) is None:
                raise
            code, status, sentence = word
            raise BindingError(f"KV {verb} failed: {status} {sentence}", code=code, status=status) from None

    def _row(self, connection: Connection, key: bytes) -> tuple[str | None, bytes] | None:
        query = f"SELECT metadata, value FROM entries WHERE key = ? AND {_LIVE}"
        row: tuple[str | None, bytes] | None = connection.execute(query, (key, int(self._now_s()))).fetchone()
        return row

    def _expiry(self, request: KVPut) -> int | None:
        if request.expiration_ttl is not None:
            if not MIN_TTL_S <= request.expiration_ttl <= 2**40:
                sentence = (
                    f"Invalid expiration_ttl of {request.expiration_ttl}. Expiration TTL must be at least {MIN_TTL_S}."
                )
                raise _refusal("PUT", 400, sentence)
            return int(self._now_s()) + request.expiration_ttl
        if request.expiration is not None:
            earliest_s = int(self._now_s()) + MIN_TTL_S
            if not earliest_s <= request.expiration <= 2**40:
                sentence = f"Invalid expiration of {request.expiration}. Expiration times must be at least {MIN_TTL_S} seconds in the future."
                raise _refusal("PUT", 400, sentence)
        return request.expiration

    def _too_long(self, size: int) -> BindingError:
        return _refusal("PUT", 413, f"Value length of {size} exceeds limit of {self._max_bytes}.")

    def _sweep(self, connection: Connection) -> None:
        now_s = self._now_s()
        if now_s - self._swept_at_s >= SWEEP_EVERY_S:
            expired = "SELECT rowid FROM entries WHERE expires_s <= ? LIMIT ?"
            delete = f"DELETE FROM entries WHERE rowid IN ({expired})"
            if connection.execute(delete, (int(now_s), SWEPT_AT_ONCE)).rowcount < SWEPT_AT_ONCE:
                self._swept_at_s = now_s  # else the next write deletes more


def _encoded(verb: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _refusal(verb, 400, "The key is not valid Unicode text.") from None


def _checked_key(verb: str, key: str) -> bytes:
    if not key:
        raise BindingError("Key name cannot be empty.", name="TypeError")
    if key in (".", ".."):
        raise BindingError(f'"{key}" is not allowed as a key name.', name="TypeError")
    encoded = _encoded(verb, key)
    if len(encoded) > MAX_KEY_BYTES:
        raise _refusal(
            verb, 414, f"UTF-8 encoded length of {len(encoded)} exceeds key length limit of {MAX_KEY_BYTES}."
        )
    return encoded


def _check_cache_ttl(cache_ttl: int | None) -> None:
    if cache_ttl is not None and cache_ttl < MIN_CACHE_TTL_S:
        raise _refusal("GET", 400, f"Invalid cache_ttl of {cache_ttl}. Cache TTL must be at least {MIN_CACHE_TTL_S}.")


def _check_metadata(metadata: str | None) -> None:
    if metadata is None:
        return
    if (size := len(metadata.encode())) > MAX_METADATA_BYTES:
        raise _refusal("PUT", 413, f"Metadata length of {size} exceeds limit of {MAX_METADATA_BYTES}.")
    try:
        msgspec.json.decode(metadata)
    except (msgspec.DecodeError, RecursionError):
        raise _refusal("PUT", 400, "Metadata must be serializable as JSON.") from None


def _decoded_cursor(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _refusal("GET", 400, "Invalid cursor; use the one from the previous list.") from None


def _refusal(verb: str, status: int, sentence: str) -> BindingError:
    return BindingError(f"KV {verb} failed: {status} {sentence}", code=status, status=status)
