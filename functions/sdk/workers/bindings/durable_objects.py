"""Durable Objects for callers: namespaces of ids, and stubs with `fetch` and the class's methods."""

import hashlib
import secrets
from typing import Any

from workers.bindings.service import fetched, remote_method
from workers.face import Channel, Face, Named, key_of, options_of

PLAIN_DIGITS = 48  # the first of an id's 64 digits; the others are a checksum, by which an id is recognised


class DurableObjectId(Named):
    def __init__(self, digits: str, name: str | None = None) -> None:
        self._digits = digits
        self.name = name

    def to_string(self) -> str:
        return self._digits

    def equals(self, other: Any) -> bool:
        return bool(self == other)

    def __str__(self) -> str:
        return self._digits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DurableObjectId) and other._digits == self._digits

    def __hash__(self) -> int:
        return hash(self._digits)

    def __repr__(self) -> str:
        return f"DurableObjectId({self._digits})"


class DurableObjectStub:
    """One object: has `fetch`, `id` and `name`; every other name is a method of its class."""

    __is_stub__ = True

    def __init__(self, channel: Channel, binding: str, id: DurableObjectId) -> None:
        self._channel = channel
        self._binding = binding
        self.id = id
        self.name = id.name

    async def fetch(self, resource: Any, options: Any = None, **named: Any) -> Any:
        return await fetched(self._channel, self._binding, self._further(), resource, options, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return remote_method(self._channel, self._binding, name, self._further())

    def _further(self) -> dict[str, Any]:
        return {"id": str(self.id), "object_name": self.name}


class DurableObjectNamespace(Face):
    def id_from_name(self, name: str) -> DurableObjectId:
        """Return the id of a name. The same name always has the same id."""
        name = key_of(name, "idFromName")
        return DurableObjectId(id_of_name(name), name)

    def new_unique_id(self, options: Any = None, **named: Any) -> DurableObjectId:
        options_of(options, named, ("jurisdiction",), "newUniqueId")
        plain = secrets.token_hex(PLAIN_DIGITS // 2)
        return DurableObjectId(plain + _check(plain))

    def id_from_string(self, text: str) -> DurableObjectId:
        text = str(text)
        if len(text) != 64 or text[PLAIN_DIGITS:] != _check(text[:PLAIN_DIGITS]):
            raise TypeError("Invalid Durable Object ID: it is 64 hexadecimal digits, as an id's string has them")
        return DurableObjectId(text)

    def get(self, id: Any, options: Any = None, **named: Any) -> DurableObjectStub:
        """Return the object's stub; the object starts only when it is called."""
        options_of(options, named, ("location_hint", "routing_mode"), "get of a Durable Object")
        if not isinstance(id, DurableObjectId):
            raise TypeError(f"get takes an id, from idFromName or the like, and not {type(id).__name__}")
        return DurableObjectStub(self._channel, self._name, id)

    def get_by_name(self, name: str, options: Any = None, **named: Any) -> DurableObjectStub:
        return self.get(self.id_from_name(name), options, **named)

    def jurisdiction(self, name: Any) -> "DurableObjectNamespace":
        """Return the namespace itself: all objects live at this site."""
        return self


def id_of_name(name: str) -> str:
    """Return the hexadecimal id of a name."""
    plain = hashlib.sha256(b"name\0" + name.encode("utf-8", "surrogatepass")).hexdigest()[:PLAIN_DIGITS]
    return plain + _check(plain)


def _check(plain: str) -> str:
    return hashlib.sha256(b"object\0" + plain.encode("utf-8", "surrogatepass")).hexdigest()[: 64 - PLAIN_DIGITS]
