"""A prompt in pieces that a later turn of its conversation repeats, by which a router recognises it: OpenAI's messages, or a plain text."""

from collections.abc import Iterator
from typing import Any

import orjson

TEXT_PIECE_BYTES = 1024  # a plain prompt is fingerprinted in pieces of this size


def pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces, and whether a prefix ending there tells conversations apart. Messages are objects."""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list):
        user_has_spoken = False
        for message in messages:
            get = message.get
            role = get("role")
            user_has_spoken = user_has_spoken or role not in ("system", "developer")
            told = [
                role,
                get("content"),
                get("name"),
                get("tool_calls"),
                get("tool_call_id"),
            ]  # what reaches the prompt
            yield canonical(told), user_has_spoken
    elif prompt is not None:
        raw = prompt.encode() if isinstance(prompt, str) else canonical(prompt)
        for start in range(0, len(raw), TEXT_PIECE_BYTES):
            yield raw[start : start + TEXT_PIECE_BYTES], True


def canonical(value: Any) -> bytes:
    """Return equal bytes for equal values."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # nested deeper than it writes (254 levels): a site refuses that by name
        return b""
