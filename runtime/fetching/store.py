"""This machine's fetched models: a folder for each listing.

Incomplete models are in hidden folders beside them, and renamed once complete. Only one process at a time fills a folder; others wait for it.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pilotlight.runtime.fetching.listing import NAME, ListingError, parse_listing
from pilotlight.support import atomic_files
from pilotlight.support.directory_locks import try_lock

STORE_ENV = "PILOTLIGHT_MODELS"
LOOK_S = 0.5  # interval of checks whether another process has fetched the same model


def store() -> Path:
    if named := os.environ.get(STORE_ENV):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotlight" / "models"


def place_of(digest: str) -> Path:
    """Return the folder for the model whose listing has this digest."""
    return store() / digest[:32]


def partial_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.partial")


def chunks_in_store() -> dict[tuple[str, int], tuple[Path, int]]:
    """Return the place of each chunk of complete models: (digest, size) -> (file, offset)."""
    found = {}
    for path in store().glob(f"[!.]*/{NAME}"):
        try:
            listing = parse_listing(path.read_bytes())
        except (OSError, ListingError):
            continue
        for chunk in listing.chunks():
            found[chunk.sha256, chunk.size] = (path.parent / chunk.file.name, chunk.start)
    return found


def settle(place: Path) -> None:
    atomic_files.replace(partial_of(place), place)


def note(url: str, place: Path) -> None:
    """Record the folder of the newest version that was fetched from the URL."""
    pointer = _pointer(url)
    beside = pointer.with_suffix(".new")
    beside.write_text(place.name)
    atomic_files.replace(beside, pointer)


def served_last(url: str) -> Path | None:
    try:
        place = store() / _pointer(url).read_text()
    except OSError:
        return None
    return place if place.is_dir() else None


def _pointer(url: str) -> Path:
    return store() / f".{hashlib.sha256(url.encode()).hexdigest()[:32]}.latest"


@asynccontextmanager
async def alone(place: Path) -> AsyncIterator[None]:
    """Open a scope in which no other process of this machine fills the folder."""
    file = place.with_name(f".{place.name}.lock")
    while (lock := try_lock(file.parent, file.name)) is None:
        await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # a process that waits for it locks another one
        os.close(lock)
