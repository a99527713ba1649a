"""Bundles of deployed functions in a directory of the router, named by the SHA-256 of their bytes.

A bundle exists whole or not at all: it is written to a temporary file, checked, synced and renamed.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pilotlight.support import atomic_files
from pilotlight.wire.hop.bundles import DIGEST, LIMITS, BundleError, BundleLimits, check, digest_of

# A bundle that no version uses is kept this long after its last upload: its deployment may be in progress.
KEPT_S = 3600.0


class BundleStore:
    def __init__(self, directory: Path, limits: BundleLimits = LIMITS, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch."""
        self._directory, self._limits, self._clock = directory, limits, clock

    def has(self, digest: str) -> bool:
        return bool(DIGEST.match(digest)) and self._path(digest).is_file()

    def renew(self, digest: str) -> bool:
        """Keep a bundle as if it were uploaded now; return whether it is stored."""
        if not self.has(digest):
            return False
        now_s = self._clock()
        os.utime(self._path(digest), (now_s, now_s))
        return True

    async def get(self, digest: str) -> bytes | None:
        if not self.has(digest):
            return None
        return await asyncio.to_thread(self._path(digest).read_bytes)

    async def put(self, digest: str, body: AsyncIterator[bytes]) -> None:
        """Store a bundle.
        Raises BundleError and stores nothing if the body is incomplete or has another digest."""
        parts, size = [], 0
        async for chunk in body:
            size += len(chunk)
            if size > self._limits.num_bytes:
                raise BundleError(f"the bundle has more than {self._limits.num_bytes >> 20} MiB")
            parts.append(chunk)
        await asyncio.to_thread(self._write, digest, b"".join(parts))

    def forget(self, kept: set[str]) -> None:
        """Remove bundles that no version uses, except new ones."""
        for path in self._directory.glob("*.tar"):
            with contextlib.suppress(OSError):
                if path.stem not in kept and path.stat().st_mtime <= self._clock() - KEPT_S:
                    path.unlink()

    def _write(self, digest: str, data: bytes) -> None:
        if (found := digest_of(data)) != digest:
            raise BundleError(f"the bundle's bytes have the SHA-256 {found[:12]} and not {digest[:12]}; send it again")
        check(data, self._limits)
        atomic_files.write(self._path(digest), data)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.tar"
