"""A packed model's URL, and its download to a directory of this machine.

A site file pins a version by its listing's digest, or takes the server's newest one. If the server cannot be reached, the last fetched version is
used.
"""

import asyncio
import logging
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from pilotlight.runtime.fetching.chunks import Fetching
from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.runtime.fetching.listing import MAX_LISTING_BYTES, NAME, ListingError, digest_of, parse_listing
from pilotlight.runtime.fetching.store import alone, note, partial_of, place_of, served_last, settle, store
from pilotlight.runtime.fetching.tries import TIMEOUT, TRIES, Unreachable, headers_for, refuse, tried

_PIN = re.compile(r"sha256=([0-9a-f]{64})")

log = logging.getLogger(__name__)


class Remote(NamedTuple):
    url: str  # URL of the directory, without a final slash
    digest: str | None  # digest of its listing, if the site file pins it

    @classmethod
    def parse(cls, source: str) -> "Remote | None":
        """Parse a source; return None if it is not a URL. Raises FetchError."""
        if not source.startswith(("http://", "https://")):
            return None
        try:
            parts = urlsplit(source)
            is_usable = bool(parts.hostname and not parts.query and not parts.username and parts.port != 0)
        except ValueError:
            is_usable = False
        if not is_usable:
            raise FetchError(f"{source} cannot be used: write https://host/folder, or https://host/folder#sha256=...")
        pin = _PIN.fullmatch(parts.fragment)
        if parts.fragment and pin is None:
            raise FetchError(
                f"{source}: after # write sha256= and 64 hexadecimal digits, as `pilotlight pack` prints them"
            )
        if pin is None and parts.scheme == "http":
            raise FetchError(
                f"{source}: plain http does not protect it from changes; use https, or pin it with #sha256=..."
            )
        return cls(parts._replace(fragment="").geturl().rstrip("/"), pin[1] if pin else None)

    def kept(self) -> Path | None:
        """Return the directory of the pinned version if it is stored already, else None."""
        place = place_of(self.digest) if self.digest else None
        return place if place is not None and place.is_dir() else None


async def fetch(remote: Remote, on_progress: Progress | None = None) -> Path:
    """Download the model if necessary and return its directory. Raises FetchError.

    If no version is pinned and the server cannot be reached, this is the version that was fetched last.
    """
    if (kept := remote.kept()) is not None:
        return kept
    async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=True, auto_decompress=False) as session:
        kept = served_last(remote.url) if remote.digest is None else None
        try:
            raw = await _listing(session, remote, 1 if kept is not None else TRIES)
        except Unreachable as error:
            if kept is None:
                raise
            log.warning("%s; its last version, %s, is used", error, kept)
            return kept
        try:
            return await _complete(session, remote, raw, on_progress or (lambda done, total: None))
        except OSError as error:
            raise FetchError(f"{remote.url} cannot be stored in {store()}: {error.strerror or error}") from None


async def _listing(session: aiohttp.ClientSession, remote: Remote, tries: int) -> bytes:
    url = f"{remote.url}/{NAME}"

    async def get() -> bytes:
        async with session.get(url, headers=headers_for(url)) as response:
            refuse(response.status, url)
            raw = bytearray()
            async for piece in response.content.iter_any():
                raw += piece
                if len(raw) > MAX_LISTING_BYTES:
                    raise FetchError(f"{url} is larger than {MAX_LISTING_BYTES >> 20} MiB: it is not a listing")
            return bytes(raw)

    raw = await tried(get, f"{url} cannot be fetched", tries)
    if remote.digest is not None and digest_of(raw) != remote.digest:
        raise FetchError(f"{url} is not what the site file pins: it has SHA-256 {digest_of(raw)}")
    return raw


async def _complete(session: aiohttp.ClientSession, remote: Remote, raw: bytes, on_progress: Progress) -> Path:
    try:
        listing = await asyncio.to_thread(parse_listing, raw)  # a large model's listing has megabytes
    except ListingError as error:
        raise FetchError(f"{remote.url}/{NAME} cannot be used: {error}") from None
    place = place_of(digest_of(raw))
    store().mkdir(parents=True, exist_ok=True)
    async with alone(place):
        if not place.is_dir():
            partial = partial_of(place)
            await Fetching(session, remote.url, listing, partial, on_progress).run()
            (partial / NAME).write_bytes(raw)
            await asyncio.to_thread(settle, place)
    note(remote.url, place)
    return place
