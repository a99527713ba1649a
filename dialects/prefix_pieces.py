"""Splits a prompt into pieces that later turns repeat, so that a router recognises the conversation.

This module handles OpenAI's messages and plain texts."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson
from blake3 import blake3

from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.body.text_files import file_in

TEXT_PIECE_BYTES = 1024  # a plain prompt is fingerprinted in pieces of this size
IMAGE_BYTES = 4096  # number of bytes that each image counts in a prefix: as many as 1,000 tokens of text
# Start of the line that Claude Code puts before its instructions. It differs in each request, so it is left out of prompts and fingerprints.
_BILLING = "x-anthropic-billing-header:"
_IMAGES = ("image_url", "input_image", "image")  # types of image parts in all dialects


def pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a prompt, and whether each identifies a conversation. Messages are JSON objects."""
    messages, prompt, image = fields.get("messages"), fields.get("prompt"), fields.get("image")
    if image is not None and not isinstance(messages, list):
        yield digest_of(image), True
    if isinstance(messages, list):
        user_has_spoken = False
        for message in messages:
            get = message.get
            role = get("role")
            user_has_spoken = user_has_spoken or role not in ("system", "developer")
            # The fields that are part of the prompt.
            told = [
                role,
                without_pixels(get("content")),
                get("name"),
                get("tool_calls"),
                get("tool_call_id"),
            ]
            yield canonical(told), user_has_spoken
        if image is not None:
            yield digest_of(image), True
    elif prompt is not None:
        raw = prompt.encode() if isinstance(prompt, str) else canonical(prompt)
        for start in range(0, len(raw), TEXT_PIECE_BYTES):
            yield raw[start : start + TEXT_PIECE_BYTES], True


def without_billing(system: Any) -> Any:
    """Return instructions without the billing line: the first block of a list, or a string's first line."""
    if isinstance(system, list) and system and isinstance(system[0], dict):
        is_billing = str(system[0].get("text")).startswith(_BILLING)
        return system[1:] if is_billing else system
    if isinstance(system, str) and system.startswith(_BILLING):
        return system.partition("\n")[2].lstrip("\n")
    return system


def without_pixels(content: Any) -> Any:
    """Return a message's parts with each image replaced by a digest, including images in tool results."""
    if not isinstance(content, list):
        return content
    return [_without_pixels(part) if isinstance(part, dict) else part for part in content]


def _without_pixels(part: dict[str, Any]) -> Any:
    if part.get("type") in _IMAGES:
        return digest_of(part).decode()
    if (file := file_in(part)) is not None:
        with suppress(ValidationError):  # a site refuses it
            return [file.named_text(), part.get("context")]
    nested = [name for name in ("content", "output") if isinstance(part.get(name), list)]
    return {**part, **{name: without_pixels(part[name]) for name in nested}} if nested else part


def digest_of(image: Any) -> bytes:
    """Return the digest of an image as it was sent; its length is IMAGE_BYTES."""
    return blake3(canonical(image)).hexdigest(length=IMAGE_BYTES // 2).encode()


def canonical(value: Any) -> bytes:
    """Encode a value so that equal values have equal bytes."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # the value is nested deeper than 254 levels, so a site refuses it
        return b""
