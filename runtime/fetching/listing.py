"""The listing of a packed model: the SHA-256 of every chunk. Any web server can serve it.

A site file can pin a listing by its digest. Two stored models share the chunks that their listings have in common. A listing comes over a network, so
all of it is checked here.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

NAME = "pilotlight-files.json"
# A chunk of this size takes an eighth of a second at 1 Gbit/s, so an interruption loses little. The listing of a 1 TB model takes 4 MB.
CHUNK_BYTES = 16 << 20
MAX_LISTING_BYTES = 64 << 20
MAX_FILES = 10_000

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,200}(/[A-Za-z0-9_][\w.+-]{0,200}){0,3}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ListingError(ValueError):
    """The listing is invalid; the message names the error."""


class ListedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # path in the model's folder, with slashes
    size: int
    sha256: tuple[str, ...]  # digest of each chunk in hex; the last chunk may be shorter


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["pilotlight-files-1"]
    chunk_bytes: int
    files: tuple[ListedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def chunks(self) -> Iterator["ListedChunk"]:
        for file in self.files:
            yield from self.chunks_of(file)

    def chunks_of(self, file: ListedFile) -> Iterator["ListedChunk"]:
        for index, sha256 in enumerate(file.sha256):
            start = index * self.chunk_bytes
            yield ListedChunk(file, start, min(self.chunk_bytes, file.size - start), sha256)


class ListedChunk(NamedTuple):
    file: ListedFile
    start: int
    size: int
    sha256: str

    @property
    def place(self) -> tuple[str, int]:
        """A unique key of the chunk.
        It is cheaper to hash than the chunk, which holds all digests of its file."""
        return self.file.name, self.start


def parse_listing(raw: bytes) -> Listing:
    """Parse a listing.

    Raises ListingError if it is incomplete, or if a file would be outside of the model's folder.
    """
    try:
        listing = msgspec.json.decode(raw, type=Listing)
    except msgspec.MsgspecError as error:
        raise ListingError(f"it is not a listing of this version: {error}") from None
    if not 1 << 16 <= listing.chunk_bytes <= 1 << 30:
        raise ListingError(f"its chunks have {listing.chunk_bytes} bytes, but 64 KiB to 1 GiB are allowed")
    if len(listing.files) > MAX_FILES:
        raise ListingError(f"it has more than {MAX_FILES} files")
    names: set[str] = set()
    for file in listing.files:
        if not _NAME.fullmatch(file.name) or file.name == NAME:
            raise ListingError(f"a file of a model cannot be called {file.name[:80]!r}")
        if file.name in names:
            raise ListingError(f"it has {file.name} twice")
        names.add(file.name)
        if file.size < 0 or len(file.sha256) != -(-file.size // listing.chunk_bytes):
            raise ListingError(f"{file.name} has {file.size} bytes and {len(file.sha256)} chunks, which do not match")
        if not all(_SHA256.fullmatch(sha256) for sha256 in file.sha256):
            raise ListingError(f"{file.name} has a chunk without a SHA-256")
    folders = {name.rsplit("/", 1)[0] for name in names if "/" in name}
    if clash := folders & names:
        raise ListingError(f"it has {min(clash)} as a file and as a folder")
    if "config.json" not in names:
        raise ListingError("it has no config.json, so it does not describe a model")
    return listing


def digest_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def write_listing(directory: Path, on_progress: Callable[[int, int], None], chunk_bytes: int = CHUNK_BYTES) -> str:
    """Write the listing of a folder's files, except hidden ones, and return its digest. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and _is_listed(path.relative_to(directory)))
    total = sum(path.stat().st_size for path in paths)
    done, files = 0, []
    for path in paths:
        sha256 = []
        with path.open("rb") as file:
            while chunk := file.read(chunk_bytes):
                sha256.append(hashlib.sha256(chunk).hexdigest())
                done += len(chunk)
                on_progress(done, total)
        files.append(ListedFile(path.relative_to(directory).as_posix(), path.stat().st_size, tuple(sha256)))
    raw = msgspec.json.format(msgspec.json.encode(Listing("pilotlight-files-1", chunk_bytes, tuple(files))), indent=1)
    parse_listing(raw)
    beside = directory / f".{NAME}.partial"
    beside.write_bytes(raw)
    beside.replace(directory / NAME)
    return digest_of(raw)


def _is_listed(relative: Path) -> bool:
    return relative.as_posix() != NAME and not any(part.startswith(".") for part in relative.parts)
