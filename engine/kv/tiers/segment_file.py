"""Segments: append-only files of records, each a header and one block, verified by checksum.

Writes are not flushed to the disk: a record torn by a crash is truncated or fails its checksum. This module defines the byte format; disk_tier.py
chooses the blocks.
"""

import errno
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from pilotlight.support.file_calls import FILE_CALLS, FileCalls

log = logging.getLogger(__name__)

# magic, checksum of the next three fields, hash, number of bytes of the block, checksum of these bytes
_HEADER = struct.Struct("<4sI32sQI12x")
_NAME = struct.Struct("<32sQI")
_MAGIC, _BLOTTED = b"PLkv", b"PLno"
HEADER_BYTES = _HEADER.size


class BlockRecord(NamedTuple):
    segment: "Segment"
    offset: int  # position of the block's bytes in the file
    num_bytes: int
    checksum: int

    def read(self, into: memoryview) -> int:
        """Fill `into` and return how many bytes were read: fewer if the file was truncated."""
        fd = os.open(self.segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return self.segment.files.preadv(fd, [into], self.offset)
        finally:
            os.close(fd)

    def blot_out(self) -> None:
        """Mark the record as bad; its bytes stay, so that later records are still found."""
        fd = os.open(self.segment.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _BLOTTED, self.offset - HEADER_BYTES)
        finally:
            os.close(fd)


@dataclass(eq=False, slots=True)
class Segment:
    path: Path
    num_bytes: int = 0
    hashes: set[bytes] = field(default_factory=set)  # hashes of the valid blocks in this segment
    fd: int = -1  # -1 unless the segment is being written to
    files: FileCalls = FILE_CALLS

    @classmethod
    def create(cls, path: Path, files: FileCalls = FILE_CALLS) -> "Segment":
        """Create a new segment for writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return cls(path, fd=os.open(path, flags, 0o600), files=files)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def append(self, block_hash: bytes, block: memoryview, checksum: int) -> BlockRecord:
        """Write a record after the last valid one, and return it. Raises OSError.

        The caller makes the record valid by adding its size to `num_bytes`.
        """
        header = _HEADER.pack(
            _MAGIC, crc32(_NAME.pack(block_hash, len(block), checksum)), block_hash, len(block), checksum
        )
        written = self.files.pwritev(self.fd, [header, block], self.num_bytes)
        if written < len(header) + len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return BlockRecord(self, self.num_bytes + HEADER_BYTES, len(block), checksum)

    def drop_torn(self) -> None:
        """Remove an incomplete record from the end of the file."""
        os.ftruncate(self.fd, self.num_bytes)

    def scan(self) -> Iterator[tuple[bytes, BlockRecord] | None]:
        """Yield hash and record of each block of an earlier process, and None for each damaged run of bytes.

        A damaged end of the file is truncated.
        """
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self.num_bytes < size:
                header = _read_header(self.files.pread(file.fileno(), HEADER_BYTES, self.num_bytes))
                if header is None:
                    next_good = _find_record(file.fileno(), self.num_bytes + 1, size)
                    if next_good is None:
                        break
                    log.warning("%s is damaged; bytes %d to %d are skipped", self.path, self.num_bytes, next_good)
                    yield None
                    self.num_bytes = next_good
                    continue
                block_hash, num_bytes, checksum, is_good = header
                offset = self.num_bytes + HEADER_BYTES
                if offset + num_bytes > size:
                    break
                self.num_bytes = offset + num_bytes
                if is_good:
                    yield block_hash, BlockRecord(self, offset, num_bytes, checksum)
        if self.num_bytes < size:  # the end was torn by a crash, or is damaged
            log.warning("%s is damaged after %d of %d bytes; the rest is dropped", self.path, self.num_bytes, size)
            yield None
            os.truncate(self.path, self.num_bytes)
        if self.num_bytes == 0:
            self.path.unlink()


class _Header(NamedTuple):
    block_hash: bytes
    num_bytes: int
    checksum: int
    is_good: bool  # False for a record marked as bad


def _read_header(header: bytes) -> _Header | None:
    if len(header) < HEADER_BYTES:
        return None
    magic, own_checksum, block_hash, num_bytes, checksum = _HEADER.unpack(header)
    if own_checksum != crc32(_NAME.pack(block_hash, num_bytes, checksum)) or magic not in (_MAGIC, _BLOTTED):
        return None
    return _Header(block_hash, num_bytes, checksum, magic == _MAGIC)


def _find_record(fd: int, start: int, size: int) -> int | None:
    """Return the offset of the first record with a valid header from `start` on, or None."""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content:
        while (start := content.find(_MAGIC, start)) >= 0:
            if _read_header(content[start : start + HEADER_BYTES]) is not None:
                return start
            start += 1
    return None
