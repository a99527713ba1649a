"""Fetch a listing's chunks into a folder: from other stored models, or from the server.

Any file server will do. If it supports ranges, several chunks are fetched at once. Every chunk is checked by its digest, so partial and damaged ones
are fetched again.
"""

import asyncio
import hashlib
import os
import shutil
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp

from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.runtime.fetching.listing import ListedChunk, ListedFile, Listing
from pilotlight.runtime.fetching.store import STORE_ENV, chunks_in_store
from pilotlight.runtime.fetching.tries import RetryLater, headers_for, refuse, tried
from pilotlight.support import background
from pilotlight.support.disk_errors import is_disk_full

CONNECTIONS = 4  # parallel connections: one rarely fills a link with a long round trip; each holds a chunk


class Fetching:
    """The download of one listing's chunks into one folder."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, listing: Listing, folder: Path, on_progress: Progress
    ) -> None:
        self._session = session
        self._url = url
        self._listing = listing
        self._folder = folder
        self._on_progress = on_progress
        self._missing: set[tuple[str, int]] = set()  # `place` of each missing chunk
        self._there = 0
        self._sequential: set[str] = set()  # files whose server does not support ranges

    async def run(self) -> None:
        missing = await asyncio.to_thread(self._look)
        self._missing = {chunk.place for chunk in missing}
        needed = sum(chunk.size for chunk in missing)
        self._there = self._listing.num_bytes - needed
        self._on_progress(self._there, self._listing.num_bytes)
        self._refuse_if_full(needed)
        await asyncio.to_thread(self._copy, missing)
        missing = [chunk for chunk in missing if chunk.place in self._missing]
        await background.run_all(missing, self._fetch_chunk, CONNECTIONS)
        for file in self._listing.files:
            if file.name in self._sequential:
                await tried(partial(self._fetch_in_order, file), self._url_of(file))

    def _look(self) -> list[ListedChunk]:
        """Create missing files, with holes, and return the chunks that the folder does not have yet.

        Chunks of earlier attempts are checked by their digests; holes in the files are not read.
        """
        missing = []
        for file in self._listing.files:
            path = self._folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                os.truncate(path, file.size)
        for chunk in self._listing.chunks():
            with (self._folder / chunk.file.name).open("rb") as opened:
                if not _holds(opened.fileno(), chunk):
                    missing.append(chunk)
        return missing

    def _refuse_if_full(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise FetchError(
                f"{self._url} needs {needed / 2**20:.0f} MiB more in {self._folder.parent}, where {free / 2**20:.0f} MiB are free: "
                f"make room, or name another folder in {STORE_ENV}"
            )

    def _copy(self, missing: list[ListedChunk]) -> None:
        """Copy the missing chunks that other stored models have."""
        others = chunks_in_store() if missing else {}
        for chunk in missing:
            at = others.get((chunk.sha256, chunk.size))
            if at is not None and self._keep(chunk, _read(*at, chunk.size)):
                self._has_come(chunk)

    async def _fetch_chunk(self, chunk: ListedChunk) -> None:
        if chunk.file.name not in self._sequential:
            where = f"{self._url_of(chunk.file)}, bytes {chunk.start} to {chunk.start + chunk.size}"
            await tried(partial(self._fetch, chunk), where)

    async def _fetch(self, chunk: ListedChunk) -> None:
        url, end = self._url_of(chunk.file), chunk.start + chunk.size
        is_whole = chunk.size == chunk.file.size
        headers = headers_for(url) | ({} if is_whole else {"range": f"bytes={chunk.start}-{end - 1}"})
        async with self._session.get(url, headers=headers) as response:
            refuse(response.status, url)
            if response.status != 206 and not is_whole:
                self._sequential.add(chunk.file.name)
            else:
                await self._keep_body(response, chunk)

    async def _fetch_in_order(self, file: ListedFile) -> None:
        """Fetch a whole file from a server without ranges; discard the chunks that are here already."""
        url = self._url_of(file)
        async with self._session.get(url, headers=headers_for(url)) as response:
            refuse(response.status, url)
            for chunk in self._listing.chunks_of(file):
                if chunk.place in self._missing:
                    await self._keep_body(response, chunk)
                else:
                    await _pass_over(response, chunk.size)

    async def _keep_body(self, response: aiohttp.ClientResponse, chunk: ListedChunk) -> None:
        body = await response.content.readexactly(chunk.size)
        if not await asyncio.to_thread(self._keep, chunk, body):
            raise RetryLater("the received chunk does not match its SHA-256 in the listing")
        self._has_come(chunk)

    def _url_of(self, file: ListedFile) -> str:
        return f"{self._url}/{quote(file.name)}"

    def _keep(self, chunk: ListedChunk, body: bytes) -> bool:
        if hashlib.sha256(body).hexdigest() != chunk.sha256:
            return False
        fd = os.open(self._folder / chunk.file.name, os.O_WRONLY)
        try:
            done = 0
            while done < len(body):
                done += os.pwrite(fd, memoryview(body)[done:], chunk.start + done)
        except OSError as error:
            if not is_disk_full(error):
                raise
            total = self._listing.num_bytes
            raise FetchError(
                f"{self._folder.parent} is full: {self._there / 2**20:.0f} of {total / 2**20:.0f} MiB of {self._url} "
                "are there; make room, and the download continues"
            ) from None
        finally:
            os.close(fd)
        return True

    def _has_come(self, chunk: ListedChunk) -> None:
        self._missing.discard(chunk.place)
        self._there += chunk.size
        self._on_progress(self._there, self._listing.num_bytes)


async def _pass_over(response: aiohttp.ClientResponse, size: int) -> None:
    while size:
        piece = await response.content.read(min(size, 1 << 20))
        if not piece:
            raise RetryLater("the answer broke off")
        size -= len(piece)


def _holds(fd: int, chunk: ListedChunk) -> bool:
    try:
        if os.lseek(fd, chunk.start, os.SEEK_DATA) >= chunk.start + chunk.size:
            return False
    except OSError:  # only a hole follows, up to the end
        return False
    return hashlib.sha256(os.pread(fd, chunk.size, chunk.start)).hexdigest() == chunk.sha256


def _read(path: Path, start: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), size, start)
    except OSError:  # the file was removed meanwhile: fetch the chunk from the server
        return b""
