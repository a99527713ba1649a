"""JSON with comments and trailing commas, as in editors' configuration files.

Comments are replaced by spaces, so that errors keep their line and column.
"""

import json
import re
from typing import Any

_CLOSING = re.compile(r"\s*[\]}]")


def loads(text: str) -> Any:
    """Parse JSON with comments. Raises json.JSONDecodeError."""
    return json.loads(_without_trailing_commas(_without_comments(text)))


def _without_comments(text: str) -> str:
    out, position = list(text), 0
    while position < len(text):
        if text[position] == '"':
            position = _end_of_string(text, position)
        elif text.startswith("//", position):
            end = text.find("\n", position)
            position = _blank(out, position, len(text) if end < 0 else end)
        elif text.startswith("/*", position):
            end = text.find("*/", position + 2)
            if end < 0:
                raise json.JSONDecodeError("a comment is not closed", text, position)
            position = _blank(out, position, end + 2)
        else:
            position += 1
    return "".join(out)


def _without_trailing_commas(text: str) -> str:
    out, position = list(text), 0
    while position < len(text):
        if text[position] == '"':
            position = _end_of_string(text, position)
            continue
        if text[position] == "," and _CLOSING.match(text, position + 1):
            out[position] = " "
        position += 1
    return "".join(out)


def _end_of_string(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != '"':
        position += 2 if text[position] == "\\" else 1
    return position + 1


def _blank(out: list[str], start: int, end: int) -> int:
    for index in range(start, end):
        if out[index] != "\n":
            out[index] = " "
    return end
