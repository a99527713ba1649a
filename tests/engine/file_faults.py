"""Faults of files under a load: a full file system, a checkpoint that must not be read, and one that changes meanwhile."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def full_file_system(patch: pytest.MonkeyPatch) -> None:
    """Let every file system have 64 KiB of free space according to the system."""
    patch.setattr("pilotlight.engine.weights.bundles.bundle_file.free_bytes", lambda directory: 1 << 16)


def file_system_that_fills_up(patch: pytest.MonkeyPatch) -> None:
    """Let every write of weights fail, although there was enough space at first."""

    def fail(descriptor: int, content: Any, start: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "pwrite", fail)


def forbid_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """Let a load fail that opens its checkpoint."""
    patch.setattr("pilotlight.engine.weights.source.Checkpoint", None)


def change_at(file: Path) -> Callable[[int, int], None]:
    """Return a report of a load's progress that changes the file's time once all is read."""

    def changed(done: int, total: int) -> None:
        if done == total:
            os.utime(file, (1, 1))

    return changed
