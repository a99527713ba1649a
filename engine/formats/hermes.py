"""Hermes-style tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen and Ember write them.

Calls come out whole when their closing tag arrives. Text between the tags that is not such an object is content, tags included: what a
model wrote is never swallowed. White space around calls belongs to them and is dropped; white space anywhere else is content.
"""

import json
from typing import Any

from engine.formats.pieces import Content, Part, ToolCall, held_suffix

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Holds back what may still become a tag, white space before it, and an open call."""

    def __init__(self) -> None:
        self._buffer = ""  # starts outside a call, or with the white space and the tag that open one
        self._body: int | None = None  # where the open call's JSON begins; None outside a call
        self._searched = 0  # no closing tag ends before here: a long call is not searched twice
        self._after_call = False  # white space now may belong to a call that has just ended

    @property
    def held_characters(self) -> int:
        return len(self._buffer)

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return _merged(parts)

    def finish(self) -> list[Part]:
        """An unclosed call whose JSON is whole is a call: models often stop before the closing tag."""
        rest, body = self._buffer, self._body
        self._buffer, self._body = "", None
        if body is not None and (call := parse_call(rest[body:])) is not None:
            return [call]
        parts: list[Part] = []
        self._emit(parts, rest)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        return self._read_outside(parts) if self._body is None else self._read_call(parts)

    def _read_outside(self, parts: list[Part]) -> bool:
        found = self._buffer.find(OPEN)
        if found >= 0:
            before = self._buffer[:found].rstrip()
            self._emit(parts, before)
            self._buffer = self._buffer[len(before) :]
            self._body = self._searched = found - len(before) + len(OPEN)
            return True
        held = held_suffix(self._buffer, (OPEN,))
        safe = self._buffer[: len(self._buffer) - held].rstrip()
        self._emit(parts, safe)
        self._buffer = self._buffer[len(safe) :]
        return False

    def _read_call(self, parts: list[Part]) -> bool:
        assert self._body is not None
        found = self._buffer.find(CLOSE, self._searched)
        if found < 0:
            self._searched = max(self._body, len(self._buffer) - len(CLOSE) + 1)
            return False
        end = found + len(CLOSE)
        call = parse_call(self._buffer[self._body : found])
        if call is None:
            self._emit(parts, self._buffer[:end])
        else:
            parts.append(call)
            self._after_call = True
        self._buffer, self._body = self._buffer[end:], None
        return True

    def _emit(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            parts.append(Content(text))
            self._after_call = False


def parse_call(text: str) -> ToolCall | None:
    """The call that a JSON text stands for, or None where it stands for none."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some fine-tunes quote the object once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbouring contents as one, so that an event carries one delta."""
    merged: list[Part] = []
    for part in parts:
        if merged and isinstance(part, Content) and isinstance(merged[-1], Content):
            merged[-1] = Content(merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged
