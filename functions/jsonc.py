"""JSON with comments and trailing commas, as in editors' configuration files.

Both are replaced by spaces, so that errors keep their line and column.
"""

import json
import re
from typing import Any

_STRING = r'("(?:\\.|[^"\\])*(?:"|\\?\Z))'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?(?:\*/|\Z(?P<open>))", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[\]}}])", re.DOTALL)


def loads(text: str) -> Any:
    """Parse JSON with comments. Raises json.JSONDecodeError."""
    return json.loads(_TRAILING_COMMA.sub(_blanked, _COMMENT.sub(_blanked, text)))


def _blanked(found: re.Match[str]) -> str:
    """Return spaces for a comment or comma, and strings as they are."""
    if found.groupdict().get("open") is not None:
        raise json.JSONDecodeError("a comment is not closed", found.string, found.start())
    return found[1] or re.sub(r"[^\n]", " ", found[0])
