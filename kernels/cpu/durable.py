"""Replacement of files that leaves a complete file even after a power cut.

A rename alone may reach the disk before the file's contents, and a power cut between them would leave an incomplete file.
"""

import os
from pathlib import Path


def replace(partial: Path, path: Path) -> None:
    """Rename `partial`, written and closed, to `path`; return when both are on the disk. Raises OSError."""
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
