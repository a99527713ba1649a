"""Conversations (/v1/conversations): named lists of items that responses continue and extend."""

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import orjson

from pilotlight.response_store.asked_responses import kept_item
from pilotlight.response_store.kept_responses import CONVERSATION, KeptResponse, PreviousResponse, joined
from pilotlight.wire.errors import ApiError

if TYPE_CHECKING:
    from pilotlight.response_store.storage import ResponseStore

MOST_ADDED = 20  # items in one request, as at OpenAI

Fields = dict[str, Any]


class Conversations:
    def __init__(self, store: "ResponseStore") -> None:
        self._store = store
        # one lock per conversation, because each change is a read and a write
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def create(self, tenant: str, given: Fields) -> Fields:
        """Create and store a conversation; return it. Raises ApiError."""
        fields = {
            "id": f"{CONVERSATION}{os.urandom(24).hex()}", "object": "conversation", "created_at": int(time.time()),
            "metadata": _metadata(given.get("metadata")),
        }  # fmt: skip
        await self._keep(tenant, fields, _items(given.get("items") or []), is_new=True)
        return fields

    async def find(self, tenant: str, name: str) -> Fields:
        """Return a conversation. Raises ApiError."""
        found = await self._store.find(name, tenant)
        return {key: found.fields[key] for key in ("id", "object", "created_at", "metadata")}

    async def items(self, tenant: str, name: str) -> bytes:
        """Return a conversation's items as JSON objects, separated by commas. Raises ApiError."""
        return (await self._said(tenant, name)).items

    async def update(self, tenant: str, name: str, given: Fields) -> Fields:
        """Replace the metadata; return the conversation. Raises ApiError."""
        metadata = _metadata(given.get("metadata"))
        async with self._turn(name):
            fields = {**await self.find(tenant, name), "metadata": metadata}
            await self._keep(tenant, fields, (await self._said(tenant, name)).items)
        return fields

    async def add(self, tenant: str, name: str, given: Fields) -> bytes:
        """Add items, and return them. Raises ApiError."""
        items = given.get("items")
        if not isinstance(items, list) or not items:
            raise ApiError("invalid_request", "items: must be a list of items, and not empty", param="items")
        added = _items(items)
        async with self._turn(name):
            await self._append(tenant, name, added)
        return added

    async def remove(self, tenant: str, name: str, item: str) -> Fields:
        """Remove an item; return the conversation. Raises ApiError."""
        async with self._turn(name):
            fields, said = await self.find(tenant, name), orjson.loads(b"[" + await self.items(tenant, name) + b"]")
            rest = [each for each in said if each.get("id") != item]
            if len(rest) == len(said):
                raise _no_item(item)
            await self._keep(tenant, fields, orjson.dumps(rest)[1:-1])
        return fields

    async def item(self, tenant: str, name: str, item: str) -> Fields:
        """Return one item. Raises ApiError."""
        said: list[Fields] = orjson.loads(b"[" + await self.items(tenant, name) + b"]")
        found = next((each for each in said if each.get("id") == item), None)
        if found is None:
            raise _no_item(item)
        return found

    async def delete(self, tenant: str, name: str) -> Fields:
        """Delete a conversation. Raises ApiError."""
        await self._store.delete(await self._store.find(name, tenant))
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    async def advance(self, response: KeptResponse, name: str) -> None:
        """Append a finished response and its input to the conversation `name`. Raises ApiError."""
        async with self._turn(name):
            before, now = response.before, await self._said(response.tenant, name)
            if before is None or now.items != before.items:  # another response has changed the conversation meanwhile
                return await self._append(response.tenant, name, joined(response.own, response.output))
            behind = await self._store.conversation(response.id, response.tenant, "conversation")
            await self._keep(response.tenant, await self.find(response.tenant, name), b"", behind)

    async def _said(self, tenant: str, name: str) -> PreviousResponse:
        return await self._store.conversation(name, tenant, "conversation")

    async def _append(self, tenant: str, name: str, added: bytes) -> None:
        said = await self._said(tenant, name)
        await self._keep(tenant, await self.find(tenant, name), joined(said.items, added))

    async def _keep(
        self, tenant: str, fields: Fields, own: bytes, before: PreviousResponse | None = None, *, is_new: bool = False
    ) -> None:
        """Store the conversation, in place of its previous state, which stays if this fails.

        Raises ApiError."""
        kept = KeptResponse(tenant, {**fields, "status": "completed", "output": []}, own, before)
        kept.replaces_another = not is_new
        if not await self._store.keep(kept):
            raise ApiError("overloaded", "the conversation cannot be stored right now: try again", retry_after_s=1)


def _items(given: Any) -> bytes:
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ApiError("invalid_request", "items: must be a list of objects", param="items")
    if len(given) > MOST_ADDED:
        raise ApiError("invalid_request", f"items: has {len(given)} items; send at most {MOST_ADDED}", param="items")
    return joined(*(kept_item(item) for item in given))


def _metadata(given: Any) -> Fields:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ApiError("invalid_request", "metadata: must be an object of texts", param="metadata")
    return given


def _no_item(item: str) -> ApiError:
    return ApiError("not_found", f"the conversation has no item {item[:100]!r}")
