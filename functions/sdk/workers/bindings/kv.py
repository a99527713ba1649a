"""KV in functions: converts values to bytes and back. The runtime checks limits and raises errors."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workers.face import Buffer, Face, Items, Record, as_record, body_of, key_of, options_of
from workers.http.streams import ByteStream
from workers.javascript import json_text

_TYPES = ("text", "json", "arrayBuffer", "stream")


class KVNamespace(Face):
    async def get(self, key: Any, options: Any = None, **named: Any) -> Any:
        """Return the value, or None if the key does not exist; for several keys, return a dict."""
        kind, cache_ttl = self._kind(options, named)
        if _are_several(key):
            found = await self._many(key, kind, cache_ttl)
            return Record({name: None if entry is None else entry[0] for name, entry in found.items()})
        return (await self._one(key_of(key, "KV get"), kind, cache_ttl))["value"]

    async def get_with_metadata(self, key: Any, options: Any = None, **named: Any) -> Any:
        """Return {value, metadata, cacheStatus}, each None if missing; for several keys, a dict of them."""
        kind, cache_ttl = self._kind(options, named)
        if not _are_several(key):
            return await self._one(key_of(key, "KV getWithMetadata"), kind, cache_ttl)
        found = await self._many(key, kind, cache_ttl)
        return Record(
            {
                name: _with_metadata(None, None) if entry is None else _with_metadata(*entry)
                for name, entry in found.items()
            }
        )

    async def put(self, key: str, value: Any, options: Any = None, **named: Any) -> None:
        given = options_of(options, named, ("expiration", "expiration_ttl", "metadata"), "KV put")
        if given.get("metadata") is not None:
            given["metadata"] = json_text(given["metadata"], "KV put: the metadata")
        for number in ("expiration", "expiration_ttl"):
            if number in given:
                given[number] = int(given[number])
        whole, stream = body_of(value, "KV put")
        await self._begin("put", stream, key=key_of(key, "KV put"), value=whole, **given)

    async def delete(self, key: str) -> None:
        await self._call("delete", key=key_of(key, "KV delete"))

    async def list(self, options: Any = None, **named: Any) -> Any:
        """List keys: {keys: [{name, expiration, metadata}], list_complete, cursor}."""
        given = options_of(options, named, ("prefix", "limit", "cursor"), "KV list")
        listed = await self._call("list", **given)
        keys = [_listed_key(*entry) for entry in listed["keys"]]
        cursor = listed.get("cursor")
        result = {"keys": keys, "list_complete": cursor is None, "cacheStatus": None}
        if cursor is not None:
            result["cursor"] = cursor
        return _Listed(result)

    def _kind(self, options: Any, named: Mapping[str, Any]) -> tuple[str, int | None]:
        if isinstance(options, str):
            options = {"type": options}
        given = options_of(options, named, ("type", "cache_ttl"), "KV get")
        kind = given.get("type", "text")
        if kind not in _TYPES:
            raise TypeError(f"KV get: unknown type {kind!r}; it is one of {', '.join(_TYPES)}")
        return kind, given.get("cache_ttl")

    async def _one(self, key: str, kind: str, cache_ttl: int | None) -> Record:
        answer = await self._begin("get", key=key, streamed=kind == "stream", cache_ttl=cache_ttl)
        entry = answer.value
        if not entry["found"]:
            return _with_metadata(None, None)
        value = ByteStream(answer.body) if kind == "stream" else _decoded(entry["value"], kind, key)
        return _with_metadata(value, entry["metadata"])

    async def _many(
        self, keys: Iterable[str], kind: str, cache_ttl: int | None
    ) -> dict[str, tuple[Any, str | None] | None]:
        if kind not in ("text", "json"):
            raise TypeError(f"KV get of several keys has the types text and json, not {kind}")
        names = [key_of(key, "KV get") for key in keys]
        entries = await self._call("get_many", keys=names, cache_ttl=cache_ttl)
        return {
            name: None if entry is None else (_decoded(entry[0], kind, name), entry[1])
            for name, entry in zip(names, entries, strict=True)
        }


class _Listed(Record):
    """The keys of a list as `result.keys`, as the platform documents it; also callable like `dict.keys`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self["keys"] = vars(self)["keys"] = _Keys(fields["keys"], super().keys)


class _Keys(Items):
    def __init__(self, keys: list[Any], names: Callable[[], Any]) -> None:
        super().__init__(keys)
        self._names = names

    def __call__(self) -> Any:
        return self._names()


def _are_several(key: Any) -> bool:
    return not isinstance(key, (str, bytes)) and isinstance(key, Iterable)


def _decoded(value: bytes, kind: str, key: str) -> Any:
    if kind == "text":
        return value.decode(errors="replace")
    try:
        return as_record(json.loads(value)) if kind == "json" else Buffer(value)
    except ValueError as error:
        raise ValueError(f"KV get: the value of {key!r} is no JSON: {error}") from None


def _with_metadata(value: Any, metadata: str | None) -> Record:
    decoded = None if metadata is None else as_record(json.loads(metadata))
    return Record(value=value, metadata=decoded, cacheStatus=None)


def _listed_key(name: str, expires_s: int | None, metadata: str | None) -> Record:
    key = Record(name=name)
    if expires_s is not None:
        key["expiration"] = expires_s
    if metadata is not None:
        key["metadata"] = as_record(json.loads(metadata))
    return key
