"""The parts of a request for a response, and the body for the inner application.

That body has the whole conversation, and `store` set to false.
"""

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from pilotlight.dialects.body.exact_json import encoded, exact_loads
from pilotlight.response_store.kept_responses import (
    CONVERSATION,
    KeptResponse,
    PreviousResponse,
    conversation_id,
    joined,
)
from pilotlight.wire.chat import MAX_MESSAGES
from pilotlight.wire.errors import ApiError

if TYPE_CHECKING:
    from pilotlight.response_store.storage import ResponseStore

Fields = dict[str, Any]


class _InputItem(msgspec.Struct, gc=False):
    """Any JSON object; its fields are skipped."""


class _InputShape(msgspec.Struct, gc=False):
    input: str | list[_InputItem] | None = None


_shape_decoder = msgspec.json.Decoder(_InputShape)


def read_fields(raw: bytes) -> Any:
    """Return a body's fields; None if it is not a JSON object.
    Raises ApiError for an invalid input, before objects are created for its items."""
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
        return exact_loads(raw)
    except orjson.JSONDecodeError:
        return None


class AskedResponse:
    """A client's request for a response; `inner` makes the request for the inner application."""

    def __init__(self, fields: Fields, tenant: str, *, is_kept: bool = False) -> None:
        """`is_kept` tells whether responses can be stored here. Raises ApiError."""
        self.tenant = tenant
        self.fields = fields
        self.previous = fields.get("previous_response_id")
        self.conversation = conversation_id(fields.get("conversation"))
        self.is_background = fields.get("background") is True
        self.is_stored = is_kept and fields.get("store") is not False
        self.wants_stream = fields.get("stream") is True
        self.before: PreviousResponse | None = None
        self.own = b""
        self.id = f"resp_{os.urandom(12).hex()}" if self.is_background else None
        if self.is_background and not self.is_stored:
            said = "leave store out" if is_kept else "none is stored here"
            raise ApiError("invalid_request", f"background: needs a stored response: {said}", param="background")
        if self.previous is not None and not isinstance(self.previous, str):
            raise ApiError("invalid_request", "previous_response_id: must be a string", param="previous_response_id")
        if self.previous is not None and self.previous.startswith(CONVERSATION):
            sentence = "previous_response_id: this is the id of a conversation: send it as `conversation`"
            raise ApiError("invalid_request", sentence, param="previous_response_id")

        if self.conversation is not None and self.previous is not None:
            sentence = "conversation: send either conversation or previous_response_id"
            raise ApiError("invalid_request", sentence, param="conversation")

    def request(self, client: Fields) -> bytes:
        """Return what is stored to continue the request, without its input, which is stored with its response.
        `client` are facts about its client."""
        given = self.fields["input"]
        return encoded({"client": client, "fields": {**self.fields, "input": given if isinstance(given, str) else []}})

    @classmethod
    def restored(cls, request: bytes, response: KeptResponse) -> "tuple[AskedResponse, Fields]":
        """Return the request for a stored response, and the facts about its client."""
        found = exact_loads(request)
        asked = cls(found["fields"], response.tenant, is_kept=True)
        asked.id, asked.own, asked.before = response.id, response.own, response.before
        return asked, found["client"]

    async def gather(self, store: "ResponseStore") -> None:
        """Load the conversation and the items to which the request refers. Raises ApiError."""
        if self.previous is not None:
            self.before = await store.conversation(self.previous, self.tenant, "previous_response_id")
        if self.conversation is not None:
            self.before = await store.conversation(self.conversation, self.tenant, "conversation")
        given = self.fields["input"]
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        found = await store.items([name for item in items if (name := _reference(item)) is not None], self.tenant)
        self.own = joined(*(found.get(_reference(item) or "") or kept_item(item) for item in items))

    def inner(self) -> bytes:
        """Return the body for the inner application. Raises ApiError if it is nested too deep."""
        named = ("previous_response_id", "background", "conversation")
        inner = {name: value for name, value in self.fields.items() if name not in named}
        inner["store"] = False
        if self.is_background:
            inner["stream"] = True
        if self.before is not None or not isinstance(self.fields["input"], str):
            before = b"" if self.before is None else self.before.items
            inner["input"] = orjson.Fragment(b"[" + joined(before, self.own) + b"]")
        return encoded(inner)

    def patched(self, response: Fields) -> Fields:
        """Return the inner application's response with the fields that the client expects."""
        told: Fields = {
            "previous_response_id": self.previous,
            "store": self.is_stored,
            "background": self.is_background,
        }
        if self.conversation is not None:
            told["conversation"] = {"id": self.conversation}
        return {**response, **told, **({"id": self.id} if self.id is not None else {})}

    def queued(self) -> KeptResponse:
        """Return a background response in its first state, `queued`."""
        return self.kept(self.patched({
            "object": "response", "created_at": int(time.time()), "status": "queued", "error": None, "incomplete_details": None,
            "model": self.fields.get("model"), "output": [], "usage": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }))  # fmt: skip

    def kept(self, response: Fields) -> KeptResponse:
        return KeptResponse(self.tenant, response, self.own, self.before)


def _reference(item: Any) -> str | None:
    is_one = isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str)
    return item["id"] if is_one else None


def kept_item(item: Any) -> bytes:
    """Return an item as stored JSON: with an id and a type, and a message's content as a list.

    Raises ApiError if it is nested too deep."""
    if not isinstance(item, dict):
        return encoded(item)
    kept = (
        {"id": f"item_{os.urandom(12).hex()}", "type": "message", **item}
        if "id" not in item
        else {"type": "message", **item}
    )
    if kept["type"] == "message" and isinstance(text := kept.get("content"), str):
        is_answer = kept.get("role") == "assistant"
        part = (
            {"type": "output_text", "text": text, "annotations": []}
            if is_answer
            else {"type": "input_text", "text": text}
        )
        kept["content"] = [part]
    return encoded(kept)
