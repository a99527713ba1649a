"""Vectorize: an index of vectors in a file of this site, searched exactly.

All vectors of an index are one matrix in memory, of which a query takes one product: 100,000 vectors of 384 numbers are 150 MB. The metric is the
cosine; the first vector that is written says how many numbers all of them have.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from runtime.functions.bindings.binding import Binding, BindingError, Declaration, Nothing, Services, method
from runtime.functions.bindings.place import directory_of
from wire.database import Connection, Database, create, transaction

MAX_DIMENSIONS = 1536
MAX_VECTORS = 100_000  # of one index
MAX_AT_ONCE = 1000
MAX_TOP_K = 100
MAX_METADATA_BYTES = 10 << 10
SCHEMA = "CREATE TABLE IF NOT EXISTS vectors (id TEXT PRIMARY KEY, namespace TEXT NOT NULL, metadata TEXT, data BLOB NOT NULL)"
Floats = NDArray[np.float32]
T = TypeVar("T")

VectorId = Annotated[str, Meta(min_length=1, max_length=64)]


class Vector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: VectorId
    values: Annotated[list[float], Meta(min_length=1, max_length=MAX_DIMENSIONS)]
    namespace: Annotated[str, Meta(max_length=64)] = ""
    metadata: dict[str, Any] | None = None


class WriteVectors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vectors: Annotated[list[Vector], Meta(max_length=MAX_AT_ONCE)]
    replaces: bool


class QueryVectors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vector: list[float] | None = None
    id: str | None = None
    top_k: Annotated[int, Meta(ge=1, le=MAX_TOP_K)] = 5
    namespace: str | None = None
    return_values: bool = False
    return_metadata: bool = False
    filter: dict[str, Any] | None = None


class VectorIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: Annotated[list[str], Meta(max_length=MAX_AT_ONCE)]


class Vectorize(Binding):
    kind = "vectorize"

    def __init__(self, index: "VectorIndex") -> None:
        self._index = index

    @classmethod
    def open(cls, declaration: Declaration, state_dir: Path, services: Services) -> "Vectorize":
        path = directory_of(state_dir, "vectorize", declaration.options["index_name"]) / "vectors.sqlite"
        return cls(services.databases.get(path, lambda path: VectorIndex(path, services.max_bytes)))

    @method
    async def write(self, request: WriteVectors) -> Any:
        return {
            "ids": await self._index.write(request.vectors, replaces=request.replaces),
            "count": len(request.vectors),
        }

    @method
    async def query(self, request: QueryVectors) -> Any:
        return await self._index.query(request)

    @method
    async def get(self, request: VectorIds) -> Any:
        table = await self._index.table()
        found = [table.rows[id] for id in request.ids if id in table.rows]
        return [_entry(table, row, True, True) for row in found]

    @method
    async def delete(self, request: VectorIds) -> Any:
        return {"ids": request.ids, "count": await self._index.delete(request.ids)}

    @method
    async def describe(self, request: Nothing) -> Any:
        table = await self._index.table()
        return {"dimensions": table.unit.shape[1], "vectorCount": len(table.ids), "metric": "cosine"}


class VectorTable(NamedTuple):
    """An index as it is searched."""

    ids: list[str]
    rows: dict[str, int]
    namespaces: list[str]
    metadata: list[str | None]
    values: Floats  # [vectors, dimensions]
    unit: Floats  # the same, each of length 1


class VectorIndex:
    """One index: its file, and its matrix, which is read from it when it has changed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._database = Database(path, lambda connection: create(connection, SCHEMA), max_bytes=max_bytes)
        self._table: VectorTable | None = None
        self._reading = asyncio.Lock()

    async def table(self) -> VectorTable:
        async with self._reading:
            if self._table is None:
                self._table = await self._database.run(_read)
            return self._table

    async def write(self, vectors: Sequence[Vector], *, replaces: bool) -> list[str]:
        def work(connection: Connection) -> list[str]:
            row = connection.execute("SELECT length(data) / 4 FROM vectors LIMIT 1").fetchone()
            dimensions = row[0] if row is not None else len(vectors[0].values) if vectors else 0
            written = []
            for vector in vectors:
                written += _write(connection, vector, dimensions, replaces)
            if connection.execute("SELECT count(*) FROM vectors").fetchone()[0] > MAX_VECTORS:
                raise BindingError(f"an index has at most {MAX_VECTORS} vectors here", status=413)
            return written

        return await self._changed(work)

    async def delete(self, ids: Sequence[str]) -> int:
        def work(connection: Connection) -> int:
            return sum(connection.execute("DELETE FROM vectors WHERE id = ?", (id,)).rowcount for id in ids)

        return await self._changed(work)

    async def query(self, request: QueryVectors) -> list[dict[str, Any]]:
        table = await self.table()
        if request.id is not None and request.id not in table.rows:
            raise BindingError(f"the index has no vector {request.id[:100]!r}", status=404)
        wanted = (
            table.values[table.rows[request.id]]
            if request.id is not None
            else np.array(request.vector or [], np.float32)
        )
        if not table.ids:
            return []
        if wanted.shape[0] != table.unit.shape[1]:
            raise BindingError(
                f"the vector has {wanted.shape[0]} numbers, and those of the index {table.unit.shape[1]}"
            )
        return await asyncio.to_thread(_search, table, wanted, request)

    async def close(self) -> None:
        await self._database.close()

    async def _changed(self, work: Callable[[Connection], T]) -> T:
        def together(connection: Connection) -> T:
            with transaction(connection):
                return work(connection)

        result = await self._database.run(together)
        self._table = None
        return result


def _write(connection: Connection, vector: Vector, dimensions: int, replaces: bool) -> list[str]:
    """Write a vector. Returns its id, or nothing where it is there already and stays."""
    values = np.array(vector.values, np.float32)
    if len(values) != dimensions:
        raise BindingError(f"the vector {vector.id!r} has {len(values)} numbers, and those of the index {dimensions}")
    if not np.isfinite(values).all():
        raise BindingError(f"the vector {vector.id!r} has numbers that are NaN or infinite")
    metadata = None if vector.metadata is None else json.dumps(vector.metadata)
    if metadata is not None and len(metadata) > MAX_METADATA_BYTES:
        raise BindingError(f"the metadata of {vector.id!r} have more than {MAX_METADATA_BYTES} bytes", status=413)
    verb = "REPLACE" if replaces else "IGNORE"
    row = (vector.id, vector.namespace, metadata, values.tobytes())
    return [vector.id] if connection.execute(f"INSERT OR {verb} INTO vectors VALUES (?, ?, ?, ?)", row).rowcount else []


def _read(connection: Connection) -> VectorTable:
    found = connection.execute("SELECT id, namespace, metadata, data FROM vectors ORDER BY id").fetchall()
    values = (
        np.frombuffer(b"".join(row[3] for row in found), np.float32).reshape(len(found), -1)
        if found
        else np.zeros((0, 0), np.float32)
    )
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)
    ids = [row[0] for row in found]
    return VectorTable(
        ids, {id: n for n, id in enumerate(ids)}, [row[1] for row in found], [row[2] for row in found], values, unit
    )


def _search(table: VectorTable, wanted: Floats, request: QueryVectors) -> list[dict[str, Any]]:
    length = float(np.linalg.norm(wanted))
    scores = table.unit @ (wanted / length if length else wanted)
    found: list[dict[str, Any]] = []
    for row in np.argsort(-scores, kind="stable"):
        if request.namespace is not None and table.namespaces[row] != request.namespace:
            continue
        if request.filter and not _passes(json.loads(table.metadata[row] or "{}"), request.filter):
            continue
        entry = _entry(table, int(row), request.return_values, request.return_metadata)
        found.append({**entry, "score": float(scores[row])})
        if len(found) == request.top_k:
            break
    return found


def _entry(table: VectorTable, row: int, with_values: bool, with_metadata: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": table.ids[row]}
    if table.namespaces[row]:
        entry["namespace"] = table.namespaces[row]
    if with_values:
        entry["values"] = table.values[row].tolist()
    if with_metadata and table.metadata[row] is not None:
        entry["metadata"] = json.loads(table.metadata[row] or "{}")
    return entry


def _passes(metadata: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Judge metadata by a filter: {key: value} or {key: {$eq, $ne, $in, $nin, $lt, $lte, $gt, $gte}}; a dot leads into an object."""
    return all(
        _matches(_at(metadata, key), rule if isinstance(rule, dict) else {"$eq": rule}) for key, rule in wanted.items()
    )


def _at(metadata: Any, key: str) -> Any:
    for part in key.split("."):
        metadata = metadata.get(part) if isinstance(metadata, dict) else None
    return metadata


def _matches(value: Any, rule: dict[str, Any]) -> bool:
    tests: dict[str, Callable[[Any], bool]] = {
        "$eq": lambda wanted: value == wanted,
        "$ne": lambda wanted: value != wanted,
        "$in": lambda wanted: value in wanted,
        "$nin": lambda wanted: value not in wanted,
        "$lt": lambda wanted: value < wanted,
        "$lte": lambda wanted: value <= wanted,
        "$gt": lambda wanted: value > wanted,
        "$gte": lambda wanted: value >= wanted,
    }
    if unknown := [word for word in rule if word not in tests]:
        raise BindingError(f"a filter has no {unknown[0]!r}; it has {', '.join(tests)}")
    try:
        return all(tests[word](wanted) for word, wanted in rule.items())
    except TypeError:  # what is not there, or of another type, is neither more nor less
        return False
