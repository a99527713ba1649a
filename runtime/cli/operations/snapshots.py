"""A folder of backups: compressed chunks, stored once by SHA-256, and a JSON file per snapshot.

The JSON file lists files by their chunks, so a snapshot only adds what has changed since the previous one. Every chunk is verified by its digest.
Independent of the meaning of the files; backup.py selects and reads them.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.support import atomic_files

CHUNK_BYTES = 1 << 20  # small, because a changed page of a database adds a whole chunk to the next snapshot
FORMAT = 1


class SavedFile(msgspec.Struct, frozen=True):
    """A file in a snapshot."""

    path: str  # path relative to its root
    mode: int
    size: int
    chunks: tuple[str, ...]  # SHA-256 of each MiB in hex


class Snapshot(msgspec.Struct, frozen=True):
    """The state at one moment.

    It has every change that was acknowledged before `created`."""

    format: int
    created: str  # RFC 3339, UTC
    version: str  # version of Pilotlight
    roots: dict[str, tuple[SavedFile, ...]]


class BackupFolder:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_written = 0  # compressed bytes of chunks that are new in the folder
        self._compressor, self._decompressor = zstandard.ZstdCompressor(3), zstandard.ZstdDecompressor()

    def make(self) -> None:
        """Create the folders. Raises CliError if they cannot be written."""
        try:
            for name in ("chunks", "snapshots"):
                (self.directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CliError(f"{self.directory} cannot hold backups: {error.strerror}.") from None

    def names(self) -> list[str]:
        """Return the names of the snapshots, the oldest first."""
        return sorted(path.stem for path in (self.directory / "snapshots").glob("*.json"))

    def read(self, name: str | None) -> Snapshot:
        """Return a snapshot; the newest if no name is given. Raises CliError."""
        names = self.names()
        if not names:
            raise CliError(f"{self.directory} holds no snapshot: `pilotlight backup {self.directory}` makes one.")
        chosen = names[-1] if name is None else name
        if chosen not in names:
            raise CliError(f"{self.directory} holds no snapshot {chosen}; it has {', '.join(names)}.")
        data = (self.directory / "snapshots" / f"{chosen}.json").read_bytes()
        try:
            found = msgspec.json.decode(data, type=Snapshot)
        except msgspec.DecodeError as error:
            raise CliError(f"the snapshot {chosen} is damaged: {error}.") from None
        if found.format > FORMAT:
            sentence = (
                f"the snapshot {chosen} was made by Pilotlight {found.version}, whose backups this version cannot read"
            )
            raise CliError(f"{sentence}: restore it with that version or a newer one.")
        return found

    def write(self, snapshot: Snapshot) -> str:
        """Write the entry of a snapshot whose chunks are stored; return its name."""
        created = datetime.fromisoformat(snapshot.created).astimezone(UTC)
        name = f"{created:%Y%m%dT%H%M%S.%f}"[:-3] + "Z"
        data = msgspec.json.format(msgspec.json.encode(snapshot))
        atomic_files.write(self.directory / "snapshots" / f"{name}.json", data)
        return name

    def add(self, file: BinaryIO) -> tuple[int, tuple[str, ...]]:
        """Store a file from its position to its end; return the number of bytes and the chunks' digests."""
        size, chunks = 0, []
        while data := file.read(CHUNK_BYTES):
            digest = hashlib.sha256(data).hexdigest()
            path = self._path(digest)
            if not path.exists():
                packed = self._compressor.compress(data)
                atomic_files.write(path, packed)
                self.num_written += len(packed)
            size += len(data)
            chunks.append(digest)
        return size, tuple(chunks)

    def content(self, file: SavedFile) -> Iterator[bytes]:
        """Yield the chunks of a file. Raises CliError if one is missing or damaged."""
        for digest in file.chunks:
            try:
                data = self._decompressor.decompress(self._path(digest).read_bytes(), CHUNK_BYTES)
            except (OSError, zstandard.ZstdError) as error:
                raise CliError(f"{file.path} cannot be restored: chunk {digest}: {error}.") from None
            if hashlib.sha256(data).hexdigest() != digest:
                raise CliError(f"{file.path} cannot be restored: chunk {digest} is damaged.")
            yield data

    def check_all_there(self, files: Iterable[SavedFile]) -> None:
        """Raise CliError if a file's chunk is missing."""
        for file in files:
            for digest in file.chunks:
                if not self._path(digest).exists():
                    raise CliError(f"{file.path} cannot be restored: chunk {digest} is missing from {self.directory}.")

    def forget_all_but(self, num_kept: int) -> None:
        """Delete all but the newest snapshots, and the chunks that only the deleted ones had."""
        for name in self.names()[:-num_kept]:
            (self.directory / "snapshots" / f"{name}.json").unlink()
        kept = {
            chunk
            for name in self.names()
            for files in self.read(name).roots.values()
            for file in files
            for chunk in file.chunks
        }
        for path in (self.directory / "chunks").glob("*/*"):
            if path.name not in kept:
                os.unlink(path)

    def _path(self, digest: str) -> Path:
        return self.directory / "chunks" / digest[:2] / digest
