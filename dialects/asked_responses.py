"""What a request for a response asks, and what is asked of those who answer instead: the whole conversation, with nothing to be kept."""

import os
import time
from typing import Any

import msgspec
import orjson

from dialects.kept_responses import ResponseStore
from wire.chat import MAX_MESSAGES
from wire.errors import ApiError

Fields = dict[str, Any]


class _InputItem(msgspec.Struct, gc=False):
    """Some object."""


class _InputShape(msgspec.Struct, gc=False):
    input: str | list[_InputItem] | None = None


_shape_decoder = msgspec.json.Decoder(_InputShape)


def read_fields(raw: bytes) -> Any:
    """Return a body, or None for what is no JSON object. Raises ApiError for an input that is none before objects are made of it."""
    if not raw.lstrip().startswith(b"{"):
        return None
    try:
        shape = _shape_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ApiError(
            "invalid_request", f"input: must be a text or a list of objects: {error}", param="input"
        ) from None
    except msgspec.DecodeError:
        return None
    if isinstance(shape.input, list) and len(shape.input) > MAX_MESSAGES:
        sentence = f"input: has {len(shape.input)} items; send at most {MAX_MESSAGES}"
        raise ApiError("invalid_request", sentence, param="input")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


class AskedResponse:
    """A request, and what the application inside is asked instead."""

    def __init__(self, fields: Fields, tenant: str, store: ResponseStore) -> None:
        self.tenant = tenant
        self.previous = fields.get("previous_response_id")
        self.is_background = fields.get("background") is True
        self.is_stored = fields.get("store") is not False
        self.wants_stream = fields.get("stream") is True
        self.model = fields.get("model")
        if self.is_background and not self.is_stored:
            raise ApiError(
                "invalid_request", "background: a background response is kept: leave store out", param="background"
            )
        before: tuple[bytes, ...] = ()
        if self.previous is not None:
            if not isinstance(self.previous, str):
                raise ApiError(
                    "invalid_request", "previous_response_id: must be a string", param="previous_response_id"
                )
            response = store.find(self.previous, tenant, "previous_response_id")
            if not response.is_ended:
                sentence = f"the response {self.previous[:100]!r} has not ended yet"
                raise ApiError("conflict", sentence, param="previous_response_id")
            before = (*response.items, *response.output_items())
        given = fields["input"]
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        self.num_before = len(before)
        self.items = (*before, *(_kept_item(item, tenant, store) for item in items))
        self.inner: Fields = {
            name: value for name, value in fields.items() if name not in ("previous_response_id", "background")
        }
        self.inner["store"] = False
        if self.is_background:
            self.inner["stream"] = True
        if before or not isinstance(given, str):
            self.inner["input"] = [orjson.Fragment(item) for item in self.items]
        self.id = f"resp_{os.urandom(12).hex()}" if self.is_background else None

    def patched(self, response: Fields) -> Fields:
        """Return the inner application's response as the client is to see it."""
        told = {"previous_response_id": self.previous, "store": self.is_stored, "background": self.is_background}
        return {**response, **told, **({"id": self.id} if self.id is not None else {})}

    def queued(self) -> Fields:
        return self.patched({
            "object": "response", "created_at": int(time.time()), "status": "queued", "error": None, "incomplete_details": None,
            "model": self.model, "output": [], "usage": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        })  # fmt: skip


def _kept_item(item: Any, tenant: str, store: ResponseStore) -> bytes:
    """Return an item with an id, or what a reference to one stands for."""
    if not isinstance(item, dict):
        return orjson.dumps(item)
    if item.get("type") == "item_reference" and isinstance(item.get("id"), str):
        return store.item(item["id"], tenant) or orjson.dumps(item)
    return orjson.dumps(item if "id" in item else {"id": f"item_{os.urandom(12).hex()}", **item})
