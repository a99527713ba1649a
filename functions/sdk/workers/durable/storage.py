"""`ctx.storage` of a Durable Object: keys, SQL, transactions and the alarm.

The data is in the object's SQLite file at the runtime. Each call blocks the process until the reply, so nothing else happens in the object meanwhile.
Writes up to the next await are committed together, before anything outside can see them.
"""

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Protocol

from workers import host
from workers.face import Items, Named, Record, as_record, key_of, options_of
from workers.javascript import Date
from workers.values import pack, unpack

STORAGE = "@objects"
LIST_OPTIONS = ("start", "start_after", "end", "prefix", "reverse", "limit")
IGNORED = ("allow_concurrency", "allow_unconfirmed", "no_cache", "scheduled_time")

_within: contextvars.ContextVar["Transaction | None"] = contextvars.ContextVar("transaction", default=None)


class Owner(Protocol):
    """The instance that owns a storage."""

    @property
    def broken(self) -> BaseException | None: ...

    def reset(self, why: BaseException) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Ready:
    """An awaitable whose result is available already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


class Asker:
    """Sends an instance's storage calls, and tracks uncommitted writes."""

    def __init__(self, class_name: str, id: str, owner: Owner) -> None:
        self._who = {"class_name": class_name, "id": id}
        self._owner = owner
        self._is_written = False
        self.transaction: Transaction | None = None
        self._who["instance"] = host.call_now(STORAGE, "start", **self._who)

    @property
    def is_foreign(self) -> bool:
        """Tell whether a transaction of another event is open."""
        return self.transaction is not None and _within.get() is not self.transaction

    def enter(self, transaction: "Transaction") -> None:
        """Start a transaction. Until it ends, other events' synchronous calls fail and their other calls wait."""
        self.flush()  # earlier writes do not belong to the transaction
        self.write("begin")
        self.transaction = transaction

    def leave(self, keep: bool) -> None:
        """End the open transaction: commit its writes if `keep`, else roll them back."""
        try:
            self.ask("end", keep=keep)
        finally:
            self.transaction = None

    def ask(self, method: str, **kwargs: Any) -> Any:
        if self._owner.broken is not None:
            raise self._owner.broken
        if self.is_foreign:
            raise RuntimeError(
                "another event's transaction is open in this object; await it, or use storage.transaction"
            )
        try:
            return host.call_now(STORAGE, method, **self._who, **kwargs)
        except Exception as error:
            if getattr(error, "code", "") == "object_reset":
                self._owner.reset(error)
            raise

    def write(self, method: str, **kwargs: Any) -> Any:
        if not self._is_written:
            self._is_written = True
            host.before_leaving.add(self._settle)
            asyncio.get_running_loop().call_soon(self._settle)
        return self.ask(method, **kwargs)

    def flush(self) -> None:
        """Commit the writes of this instance. Raises if that fails."""
        if self._is_written and self.transaction is None and self._owner.broken is None:
            self._is_written = False
            host.before_leaving.discard(self._settle)
            try:
                host.call_now(STORAGE, "commit", **self._who)
            except Exception as error:
                self._owner.reset(error)
                raise

    def abandon(self) -> None:
        """Roll back uncommitted writes, because this instance is discarded."""
        host.before_leaving.discard(self._settle)
        with suppress(Exception):  # if this fails, the writes are rolled back when the next instance starts
            host.call_now(STORAGE, "abandon", **self._who)

    def _settle(self) -> None:
        try:
            self.flush()
        except Exception:
            return  # the instance is reset, and its events fail with the reason


class Keys:
    """`get`, `put`, `delete` and `list` as synchronous calls."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def get(self, key: Any) -> Any:
        keys = _keys(key)
        found = self._asker.ask("get", keys=keys)
        return _unpacked(found) if _are_several(key) else unpack(found.get(keys[0]))

    def put(self, key: Any, value: Any) -> None:
        entries = dict(key) if isinstance(key, Mapping) else {key_of(key, "storage.put"): value}
        self._asker.write("put", entries={name: pack(each, f"the value of {name!r}") for name, each in entries.items()})

    def delete(self, key: Any) -> Any:
        count = self._asker.write("delete", keys=_keys(key))
        return count if _are_several(key) else bool(count)

    def list(self, options: Any, named: Mapping[str, Any]) -> Record:
        given = options_of(options, named, LIST_OPTIONS + IGNORED, "list")
        wanted = {name: value for name, value in given.items() if name in LIST_OPTIONS}
        return _unpacked(dict(self._asker.ask("list", **wanted)))


class SyncKv(Named):
    """`ctx.storage.kv`: the key-value calls without await."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def get(self, key: str) -> Any:
        return self._keys.get(key)

    def put(self, key: str, value: Any) -> None:
        self._keys.put(key, value)

    def delete(self, key: str) -> Any:
        return self._keys.delete(key)

    def list(self, options: Any = None, **named: Any) -> Items:
        """Return a list of [key, value]."""
        return Items(Items(pair) for pair in self._keys.list(options, named).items())


class SqlCursor(Named):
    """The result of `sql.exec`: an iterator over rows as Records."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.column_names = Items(answer["columns"])
        self.rows_read = answer["rows_read"]
        self.rows_written = answer["rows_written"]
        self._rows = iter(answer["rows"])

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        return Record(zip(self.column_names, as_record(next(self._rows)), strict=True))

    def next(self) -> Record:
        """Return {done, value}, like a JavaScript iterator."""
        row = next(self, None)
        return Record(done=row is None, value=row)

    def to_array(self) -> Items:
        return Items(self)

    def one(self) -> Record:
        rows = list(self)
        if len(rows) != 1:
            raise ValueError(f"Expected exactly one result from SQL query, but got {len(rows) or 'no results'}.")
        return rows[0]

    def raw(self) -> "_Raw":
        return _Raw(as_record(list(self._rows)))


class _Raw(Items):
    def to_array(self) -> Items:
        return Items(self)

    toArray = to_array


class Sql(Named):
    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def exec(self, query: str, *bindings: Any) -> SqlCursor:
        for value in bindings:
            if value is not None and not isinstance(value, (bool, int, float, str, bytes, bytearray, memoryview)):
                kind = type(value).__name__
                raise TypeError(f"sql.exec cannot bind {kind}; bind None, bool, int, float, str or bytes")
        given = list(bindings)
        send = self._asker.ask if _only_reads(query) else self._asker.write
        return SqlCursor(send("sql", sql=query, parameters=given))

    @property
    def database_size(self) -> int:
        return int(self._asker.ask("size"))


class Storage(Named):
    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._keys = Keys(asker)
        self._turn = asyncio.Lock()  # held by one transaction at a time
        self.kv = SyncKv(self._keys)
        self.sql = Sql(asker)

    def get(self, key: Any, options: Any = None, **named: Any) -> Awaitable[Any]:
        """Return a value, or None; for a list of keys, the values of those that exist."""
        return self._do(lambda: self._keys.get(key))

    def put(self, key: Any, value: Any = None, options: Any = None, **named: Any) -> Awaitable[None]:
        return self._do(lambda: self._keys.put(key, value))

    def delete(self, key: Any, options: Any = None, **named: Any) -> Awaitable[Any]:
        """Delete a key and return whether it existed; for a list of keys, return how many existed."""
        return self._do(lambda: self._keys.delete(key))

    def list(self, options: Any = None, **named: Any) -> Awaitable[Record]:
        return self._do(lambda: self._keys.list(options, named))

    def delete_all(self, options: Any = None) -> Awaitable[None]:
        return self._do(lambda: self._asker.write("delete_all"))

    def get_alarm(self, options: Any = None) -> Awaitable[int | None]:
        """Return the alarm's Unix time in ms; None if none is set."""
        return self._do(lambda: self._asker.ask("get_alarm"))

    def set_alarm(self, scheduled_time: Any, options: Any = None) -> Awaitable[None]:
        """Set the alarm to a Unix time in ms, a datetime or a Date."""
        at_ms = _ms_of(scheduled_time, "setAlarm")
        return self._do(lambda: self._asker.write("set_alarm", at_ms=max(0, at_ms)))

    def delete_alarm(self, options: Any = None) -> Awaitable[None]:
        return self._do(lambda: self._asker.write("delete_alarm"))

    def get_current_bookmark(self) -> Awaitable[str]:
        """Return the bookmark of the content as it is now."""
        return self._do(lambda: self._flushed("current_bookmark"))

    def get_bookmark_for_time(self, timestamp: Any) -> Awaitable[str]:
        """Return the bookmark of the content at a Unix time in ms, a datetime or a Date."""
        at_ms = _ms_of(timestamp, "getBookmarkForTime")
        return self._do(lambda: self._flushed("bookmark_at", at_ms=max(0, at_ms)))

    def on_next_session_restore_bookmark(self, bookmark: str) -> Awaitable[str]:
        """Restore a bookmark when the object starts next, for example after `ctx.abort()`.
        Return the bookmark that undoes it."""
        return self._do(lambda: self._flushed("restore_next", bookmark=bookmark))

    def sync(self) -> Awaitable[None]:
        """Wait until all writes are on disk."""
        return self._do(self._asker.flush)

    def transaction_sync(self, callback: Callable[[], Any]) -> Any:
        """Run the callback in a transaction: an exception rolls back its writes."""
        self._asker.write("begin")
        try:
            value = callback()
            if inspect.isawaitable(value):
                raise TypeError("transactionSync takes a plain function; use transaction for one that awaits")
        except BaseException:
            self._asker.ask("end", keep=False)
            raise
        self._asker.ask("end", keep=True)
        return value

    async def transaction(self, closure: Callable[["Transaction"], Any]) -> Any:
        """Run a closure, which may await, in a transaction.
        No other event of this object starts until it ends."""
        if self._asker.transaction is not None and not self._asker.is_foreign:
            raise RuntimeError("a transaction is open already; transactions do not nest, except transactionSync")
        async with self._turn:
            return await self._transact(closure)

    async def _transact(self, closure: Callable[["Transaction"], Any]) -> Any:
        asker = self._asker
        transaction = Transaction(self._keys)
        asker.enter(transaction)
        token = _within.set(transaction)
        asker._owner.hold()
        keep = False
        try:
            value = closure(transaction)
            value = await value if inspect.isawaitable(value) else value
            keep = not transaction.is_over
            return value
        finally:
            try:
                asker.leave(keep)
            finally:
                _within.reset(token)
                asker._owner.release()
                asker.flush()

    def _flushed(self, method: str, **kwargs: Any) -> Any:
        self._asker.flush()
        return self._asker.ask(method, **kwargs)

    def _do(self, work: Callable[[], Any]) -> Awaitable[Any]:
        return self._later(work) if self._asker.is_foreign else Ready(work())

    async def _later(self, work: Callable[[], Any]) -> Any:
        async with self._turn:
            return work()


class Transaction(Named):
    """The argument of `transaction`'s closure."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.is_over = False

    def get(self, key: Any, options: Any = None) -> Awaitable[Any]:
        return Ready(self._keys.get(key))

    def put(self, key: Any, value: Any = None, options: Any = None) -> Awaitable[None]:
        self._keys.put(key, value)
        return Ready(None)

    def delete(self, key: Any, options: Any = None) -> Awaitable[Any]:
        return Ready(self._keys.delete(key))

    def list(self, options: Any = None, **named: Any) -> Awaitable[Record]:
        return Ready(self._keys.list(options, named))

    def rollback(self) -> None:
        """Roll the transaction back, however the closure ends."""
        self.is_over = True


def _unpacked(entries: Mapping[str, Any]) -> Record:
    return Record({key: unpack(value) for key, value in entries.items()})


def _are_several(key: Any) -> bool:
    return isinstance(key, Iterable) and not isinstance(key, (str, bytes, Mapping))


def _keys(key: Any) -> list[str]:
    if _are_several(key):
        return [key_of(each, "storage") for each in key]
    return [key_of(key, "storage")]


def _ms_of(moment: Any, method: str) -> int:
    if isinstance(moment, datetime):
        moment = moment.timestamp() * 1000
    if not isinstance(moment, (int, float, Date)):
        kind = type(moment).__name__
        raise TypeError(f"{method} takes milliseconds since 1970, a datetime or a Date, and not {kind}")
    return int(moment)


def _only_reads(query: str) -> bool:
    """Tell whether a statement certainly only reads; all others count as writes."""
    return query.lstrip()[:6].upper() == "SELECT" and ";" not in query.rstrip().removesuffix(";")
