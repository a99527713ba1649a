"""Edit arrays of tables in TOML files by their lines, so that the rest of a file keeps its form.

Callers parse the changed text before they write it, because a file may write its tables in another form.
"""

import json
import re
from pathlib import Path

from pilotlight.support import atomic_files

_ANY_TABLE = re.compile(r"^[ \t]*\[")


def literal(value: str | float) -> str:
    """Return a text or a number as TOML.
    By default JSON would escape rare characters as surrogates, which TOML does not have."""
    return json.dumps(value, ensure_ascii=False)


def with_table(text: str, table: str) -> str:
    """Return the text with a table after its last line."""
    return text + ("\n" if text and not text.endswith("\n") else "") + ("\n" if text else "") + table


def split_at_table(text: str, array: str, number: int) -> tuple[list[str], list[str], list[str]] | None:
    """Return the lines before an array's table, of the table, and after it.

    None if the file does not write so many entries as `[[array]]` tables."""
    lines = text.splitlines(keepends=True)
    head = re.compile(rf"[ \t]*\[\[[ \t]*{array}[ \t]*\]\][ \t]*(#.*)?$")
    starts = [i for i, line in enumerate(lines) if head.match(line.rstrip("\r\n"))]
    if number >= len(starts):
        return None
    start = starts[number]
    end = next((i for i in range(start + 1, len(lines)) if _ANY_TABLE.match(lines[i])), len(lines))
    return lines[:start], lines[start:end], lines[end:]


def write(file: Path, text: str) -> None:
    """Write a file completely or not at all, with its permissions. Raises OSError.

    Only its owner can read a new file."""
    real = file.resolve()
    real.parent.stat()  # a folder that does not exist is an error: it is not created
    mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
    atomic_files.write(real, text.encode(), mode)
