"""Vectorize: an index of vectors in a file of this site, searched exactly by cosine similarity.

A query scans the file block by block through the kernel's page cache, so each query holds one block in memory however large the index is (100,000
vectors of 1,536 numbers took 1.8 GB as a matrix). The first vector fixes the number of dimensions.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pilotlight.functions.bindings.binding import Binding, BindingError, BindingLimits, Nothing, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import Connection, Database, transaction

MAX_DIMENSIONS = 1536
MAX_AT_ONCE = 1000
MAX_TOP_K = 100
MAX_METADATA_BYTES = 10 << 10
SCHEMA = "CREATE TABLE IF NOT EXISTS vectors (id TEXT PRIMARY KEY, namespace TEXT NOT NULL, metadata TEXT, data BLOB NOT NULL)"
Floats = NDArray[np.float32]

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

    def __init__(self, database: Database, limits: BindingLimits) -> None:
        self._database = database
        self._limits = limits

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "Vectorize":
        path = directory_of(state_dir, "vectorize", declaration.options["index_name"]) / "vectors.sqlite"
        return cls(services.database(path, SCHEMA), services.limits)

    @method
    async def write(self, request: WriteVectors) -> Any:
        ids = await self._database.run(lambda connection: _write_all(connection, request, self._limits.index_vectors))
        return {"ids": ids, "count": len(request.vectors)}

    @method
    async def query(self, request: QueryVectors) -> Any:
        return await self._database.run(lambda connection: _query(connection, request, self._limits.index_block_bytes))

    @method
    async def get(self, request: VectorIds) -> Any:
        def work(connection: Connection) -> list[dict[str, Any]]:
            return [_entry(row, True, True) for id in request.ids if (row := _row(connection, id)) is not None]

        return await self._database.run(work)

    @method
    async def delete(self, request: VectorIds) -> Any:
        def work(connection: Connection) -> int:
            with transaction(connection):
                return sum(connection.execute("DELETE FROM vectors WHERE id = ?", (id,)).rowcount for id in request.ids)

        return {"ids": request.ids, "count": await self._database.run(work)}

    @method
    async def describe(self, request: Nothing) -> Any:
        def work(connection: Connection) -> dict[str, Any]:
            return {"dimensions": _dimensions(connection) or 0, "vectorCount": _count(connection), "metric": "cosine"}

        return await self._database.run(work)


class _StoredVector(NamedTuple):
    id: str
    namespace: str
    metadata: str | None
    data: bytes

    @property
    def values(self) -> Floats:
        return np.frombuffer(self.data, np.float32)


_Scored = tuple[float, _StoredVector]


def _write_all(connection: Connection, request: WriteVectors, most: int) -> list[str]:
    with transaction(connection):
        dimensions = _dimensions(connection) or (len(request.vectors[0].values) if request.vectors else 0)
        written = []
        for vector in request.vectors:
            written += _write(connection, vector, dimensions, request.replaces)
        if _count(connection) > most:
            raise BindingError(f"an index has at most {most} vectors here", status=413)
    return written


def _write(connection: Connection, vector: Vector, dimensions: int, replaces: bool) -> list[str]:
    """Write a vector. Return its id, or nothing if it exists and is not replaced."""
    values = np.array(vector.values, np.float32)
    if len(values) != dimensions:
        raise BindingError(
            f"the vector {vector.id!r} has {len(values)} numbers, but the index has vectors of {dimensions}"
        )
    if not np.isfinite(values).all():
        raise BindingError(f"the vector {vector.id!r} has numbers that are NaN or infinite")
    metadata = None if vector.metadata is None else json.dumps(vector.metadata)
    if metadata is not None and len(metadata) > MAX_METADATA_BYTES:
        raise BindingError(f"the metadata of {vector.id!r} have more than {MAX_METADATA_BYTES} bytes", status=413)
    verb = "REPLACE" if replaces else "IGNORE"
    row = (vector.id, vector.namespace, metadata, values.tobytes())
    return [vector.id] if connection.execute(f"INSERT OR {verb} INTO vectors VALUES (?, ?, ?, ?)", row).rowcount else []


def _dimensions(connection: Connection) -> int | None:
    """Return the dimension of the index's vectors; None if it is empty."""
    row = connection.execute("SELECT length(data) / 4 FROM vectors LIMIT 1").fetchone()
    return None if row is None else row[0]


def _count(connection: Connection) -> int:
    count: int = connection.execute("SELECT count(*) FROM vectors").fetchone()[0]
    return count


def _row(connection: Connection, id: str) -> _StoredVector | None:
    found = connection.execute("SELECT id, namespace, metadata, data FROM vectors WHERE id = ?", (id,)).fetchone()
    return None if found is None else _StoredVector(*found)


def _query(connection: Connection, request: QueryVectors, block_bytes: int) -> list[dict[str, Any]]:
    wanted = np.array(request.vector or [], np.float32)
    if request.id is not None:
        if (row := _row(connection, request.id)) is None:
            raise BindingError(f"the index has no vector {request.id[:100]!r}", status=404)
        wanted = row.values
    if (dimensions := _dimensions(connection)) is None:
        return []
    if len(wanted) != dimensions:
        raise BindingError(f"the vector has {len(wanted)} numbers, but the index has vectors of {dimensions}")
    best: list[_Scored] = []
    for rows in _blocks(connection, request.namespace, max(1, block_bytes // (4 * dimensions))):
        best = _best(best, rows, _scores(rows, wanted), request)
    return [{**_entry(row, request.return_values, request.return_metadata), "score": score} for score, row in best]


def _blocks(connection: Connection, namespace: str | None, num_rows: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the vectors of a namespace, or of all, in blocks."""
    condition, values = ("", ()) if namespace is None else (" WHERE namespace = ?", (namespace,))
    cursor = connection.execute(f"SELECT id, namespace, metadata, data FROM vectors{condition}", values)
    while rows := cursor.fetchmany(num_rows):
        yield rows


def _scores(rows: list[tuple[Any, ...]], wanted: Floats) -> Floats:
    """Return the cosine similarity of each row; 0 for vectors of length zero."""
    block = np.frombuffer(b"".join([row[3] for row in rows]), np.float32).reshape(len(rows), -1)
    lengths = np.sqrt(np.einsum("ij,ij->i", block, block)) * np.linalg.norm(wanted)
    scores: Floats = np.divide(block @ wanted, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return scores


def _best(best: list[_Scored], rows: list[tuple[Any, ...]], scores: Floats, request: QueryVectors) -> list[_Scored]:
    """Return the best `top_k` of the earlier and the new rows; among equal scores the lowest ids.
    The filter is evaluated only for rows whose score suffices."""
    worst = best[-1][0] if len(best) == request.top_k else -np.inf
    found: list[_Scored] = []
    for score, row in sorted(
        [(float(scores[i]), _StoredVector(*rows[i])) for i in np.flatnonzero(scores >= worst)], key=_order
    ):
        if len(found) == request.top_k:
            break
        if not request.filter or _passes(json.loads(row.metadata or "{}"), request.filter):
            found.append((score, row))
    return sorted([*best, *found], key=_order)[: request.top_k]


def _order(scored: _Scored) -> tuple[float, str]:
    return -scored[0], scored[1].id


def _entry(row: _StoredVector, with_values: bool, with_metadata: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": row.id}
    if row.namespace:
        entry["namespace"] = row.namespace
    if with_values:
        entry["values"] = row.values.tolist()
    if with_metadata and row.metadata is not None:
        entry["metadata"] = json.loads(row.metadata)
    return entry


def _passes(metadata: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Tell whether metadata matches a filter; a dot in a key selects a nested value.
    A filter is {key: value} or {key: {$eq, $ne, $in, $nin, $lt, $lte, $gt, $gte}}."""
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
    except TypeError:  # a missing value, or one of another type, matches no comparison
        return False
