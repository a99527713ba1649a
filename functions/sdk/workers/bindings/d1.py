"""D1 for functions: prepared statements that are immutable, and results whose rows have attributes."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from pilotlight.functions.channel.failure import Failure
from workers.face import Channel, Face, Items, Record, as_record, options_of


class D1PreparedStatement(Face):
    """A statement with its parameters; `bind` returns a new one."""

    def __init__(self, channel: Channel, name: str, sql: str, parameters: tuple[Any, ...] = ()) -> None:
        super().__init__(channel, name, {})
        self._sql = sql
        self._parameters = parameters

    def bind(self, *parameters: Any) -> "D1PreparedStatement":
        return D1PreparedStatement(self._channel, self._name, self._sql, tuple(_bound(value) for value in parameters))

    async def all(self, options: Any = None) -> Record:
        """Return {success, meta, results}."""
        return _result(await self._query())

    async def run(self, options: Any = None) -> Record:
        return await self.all()

    async def first(self, column: str | None = None) -> Any:
        """Return the first row, or one of its columns; None if there are no rows."""
        answer = await self._query()
        if not answer["rows"]:
            return None
        row = _row(answer["columns"], answer["rows"][0])
        if column is None:
            return row
        if column not in row:
            raise ValueError(f"D1_ERROR: Column not found ({column}); there is {', '.join(row)}")
        return row[column]

    async def raw(self, options: Any = None, **named: Any) -> Items:
        given = options_of(options, named, ("column_names",), "D1 raw")
        answer = await self._query()
        rows = [Items(_value(value) for value in row) for row in answer["rows"]]
        return Items([Items(answer["columns"]), *rows] if given.get("column_names") else rows)

    async def _query(self) -> Any:
        return await self._channel.call(self._name, "query", statement=self._message())

    def _message(self) -> dict[str, Any]:
        return {"sql": self._sql, "parameters": list(self._parameters)}


class D1Database(Face):
    def prepare(self, query: str) -> D1PreparedStatement:
        if not isinstance(query, str):
            raise TypeError(f"D1 prepare takes a str of SQL, not {type(query).__name__}")
        return D1PreparedStatement(self._channel, self._name, query)

    async def batch(self, statements: Iterable[D1PreparedStatement]) -> Items:
        messages = []
        for statement in statements:
            if not isinstance(statement, D1PreparedStatement):
                raise TypeError(f"D1 batch takes prepared statements, not {type(statement).__name__}")
            messages.append(statement._message())
        return Items(_result(answer) for answer in await self._call("batch", statements=messages))

    async def exec(self, query: str) -> Record:
        """Run a script; return {count, duration}."""
        return Record(await self._call("exec", script=query))

    def with_session(self, constraint: str = "first-unconstrained") -> "D1Session":
        """Return a session.
        A database has only one copy, so all sessions are consistent."""
        return D1Session(self._channel, self._name, self._options)


class D1Session(D1Database):
    _asked_ns: int | None = None

    def prepare(self, query: str) -> D1PreparedStatement:
        self._asked_ns = time.time_ns()
        return super().prepare(query)

    def get_bookmark(self) -> str | None:
        """Return a bookmark for a later session; None before the first statement.
        Bookmarks have no effect, because every session sees all writes."""
        return None if self._asked_ns is None else f"{self._asked_ns:016x}"


def _bound(value: Any) -> Any:
    """Return a value in a form that can be bound. Raises Failure (D1_TYPE_ERROR)."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= 255 for item in value):
        return bytes(value)  # so that a BLOB from a result can be bound again
    if value is not None and not isinstance(value, (bool, int, float, str, bytes, bytearray, memoryview)):
        sentence = f"Type {type(value).__name__!r} not supported for value {str(value)[:100]!r}"
        raise Failure(f"D1_TYPE_ERROR: {sentence}; bind None, bool, int, float, str or bytes", name="TypeError")
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


def _result(answer: Any) -> Record:
    rows = Items(_row(answer["columns"], row) for row in answer["rows"])
    return Record(success=True, meta=as_record(answer["meta"]), results=rows)


def _row(columns: Sequence[str], row: Sequence[Any]) -> Record:
    return Record(zip(columns, (_value(value) for value in row), strict=True))


def _value(value: Any) -> Any:
    """Return a value of a result as the platform does: a BLOB becomes a list of numbers."""
    return Items(value) if isinstance(value, bytes) else value
