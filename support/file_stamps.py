"""Detect changed files by time, size and inode, so that a renamed file counts too."""

import os
from pathlib import Path


def stamp(file: Path) -> object:
    """Return a value that changes when the file is written or replaced; a missing file has a stamp too."""
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
