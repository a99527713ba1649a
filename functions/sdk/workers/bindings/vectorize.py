"""Vectorize in functions: stores vectors with metadata, and finds the most similar ones."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from workers.face import Face, Items, Record, as_record, options_of


class Vectorize(Face):
    async def insert(self, vectors: Iterable[Any]) -> Record:
        """Add vectors {id, values, namespace?, metadata?}; vectors with existing ids are skipped."""
        return _mutation(await self._call("write", vectors=_vectors(vectors), replaces=False))

    async def upsert(self, vectors: Iterable[Any]) -> Record:
        """Add vectors; replace those with existing ids."""
        return _mutation(await self._call("write", vectors=_vectors(vectors), replaces=True))

    async def query(self, vector: Any, options: Any = None, **named: Any) -> Record:
        """Return {count, matches: [{id, score, values?, metadata?}]}, the most similar first."""
        return _matches(await self._call("query", vector=_values(vector), **_query(options, named)))

    async def query_by_id(self, id: str, options: Any = None, **named: Any) -> Record:
        return _matches(await self._call("query", id=str(id), **_query(options, named)))

    async def get_by_ids(self, ids: Iterable[str]) -> Items:
        return Items(as_record(await self._call("get", ids=list(ids))))

    async def delete_by_ids(self, ids: Iterable[str]) -> Record:
        return _mutation(await self._call("delete", ids=list(ids)))

    async def describe(self) -> Record:
        """Return {dimensions, vectorCount, metric}."""
        return Record(as_record(await self._call("describe")))


def _mutation(answer: Any) -> Record:
    """Return {ids, count}, as the platform's first version does, and mutationId, as its current one does."""
    return Record(as_record(answer), mutationId=str(uuid.uuid4()))


def _query(options: Any, named: dict[str, Any]) -> dict[str, Any]:
    known = ("top_k", "namespace", "return_values", "return_metadata", "filter")
    given = options_of(options, named, known, "Vectorize query")
    given["return_metadata"] = given.get("return_metadata", "none") not in (False, "none")
    return given


def _vectors(vectors: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(vectors, Mapping):
        raise TypeError("Vectorize takes a list of vectors: [{'id': ..., 'values': [...]}, ...]")
    found = []
    for each in vectors:
        vector = options_of(each, {}, ("id", "values", "namespace", "metadata"), "Vectorize vector")
        if missing := [name for name in ("id", "values") if name not in vector]:
            raise TypeError(f"Vectorize: a vector has an id and values; {missing[0]!r} is missing")
        found.append({**vector, "id": str(vector["id"]), "values": _values(vector.get("values", ()))})
    return found


def _values(vector: Any) -> list[float]:
    return [float(value) for value in (vector.tolist() if hasattr(vector, "tolist") else vector)]


def _matches(answer: Any) -> Record:
    matches = Items(as_record(answer))
    return Record(count=len(matches), matches=matches)
