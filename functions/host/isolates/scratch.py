"""The directory that a function's isolates write to at tier 1, with a limit on its size.

At tier 2 each isolate has a file system of that size instead.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser

LOOK_S = 0.25  # pause between two checks of the size


class WritingIsolate(Protocol):
    def end(self, why: str, code: str, /) -> None: ...

    async def until_gone(self) -> None: ...


class Scratch:
    def __init__(self, path: Path, limit_mib: int, user: FunctionUser, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self.path = path
        self._limit_mib = limit_mib
        self._user = user

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if (uid := self._user.id) is not None:
            os.chown(self.path, uid, uid)

    async def enforce(self, isolates: Sequence[WritingIsolate]) -> None:
        """Check the size once, then pause.
        Above the limit, end all isolates, because any of them may have written the files, and empty the directory."""
        limit_bytes = self._limit_mib << 20
        if await asyncio.to_thread(bytes_below, self.path, limit_bytes) > limit_bytes:
            guilty = tuple(isolates)
            for isolate in guilty:
                isolate.end(f"its files have more than {self._limit_mib} MiB", "disk")
            await asyncio.gather(*(isolate.until_gone() for isolate in guilty))
            await asyncio.to_thread(empty, self.path)
        await asyncio.sleep(self._look_s)

    async def remove(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path, ignore_errors=True)


def bytes_below(folder: Path, enough: int) -> int:
    """Return the bytes that files take on disk; stop counting at `enough`."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # deleted meanwhile
        total += 512 * len(files)  # each file costs an inode, even if it is empty
        if total > enough:
            break
    return total


def empty(folder: Path) -> None:
    """Delete a folder's contents; the folder itself stays, because running processes use it."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
