"""The disk tier: KV blocks in append-only segments of one directory, found by the hash of their content's chain, trusted by checksum alone.

A segment is a run of records, each a header and one block; the oldest unused segment gives way as a whole. Nothing is flushed: what a crash
tears is cut off or fails its checksum, and is computed again. A disk that keeps refusing is let be, and tried again from time to time. Knows
files and errors; refuses to know models, tokens and threads (whose business it is not to be in the engine's way is disk_thread.py's). Safe to
use from several threads.
"""

import errno
import logging
import mmap
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from engine.kv.host_tier import TierError
from engine.kv.slot_file import lock_directory

log = logging.getLogger(__name__)

_SEGMENTS = 16  # a limit's worth: what gives way at once is no more than this part of the cache
_MAX_SEGMENT_BYTES = 256 << 20
_PATIENCE = 3  # errors in a row, after which reading or writing is given up for:
_FIRST_PAUSE_S = 10.0  # doubled after each try that fails, up to:
_LONGEST_PAUSE_S = 300.0
# magic, checksum of the rest, hash, bytes of the block, their checksum
_HEADER = struct.Struct("<4sI32sQI12x")
_NAME = struct.Struct("<32sQI")
_MAGIC = b"PLkv"


class _BlockRecord(NamedTuple):
    segment: "_Segment"
    offset: int  # of the block's bytes
    num_bytes: int
    checksum: int


@dataclass(eq=False, slots=True)
class _Segment:
    path: Path
    num_bytes: int = 0
    hashes: set[bytes] = field(default_factory=set)


class DiskTier:
    """Use as `DiskTier.open(directory, limit_bytes)`; nothing is found until `scan` has looked through what an earlier process left."""

    def __init__(
        self, directory: Path, limit_bytes: int, lock_fd: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_bytes = limit_bytes
        self.num_corrupt = 0
        self.num_errors = 0
        self._directory = directory
        self._lock_fd = lock_fd
        self._lock = threading.Lock()
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, limit_bytes // _SEGMENTS)
        self._segments: OrderedDict[_Segment, None] = OrderedDict()  # unused for longest first
        self._records: dict[bytes, _BlockRecord] = {}
        self._active: _Segment | None = None  # written to by one thread
        self._active_fd = -1
        self._next_number = 0
        self._write_errors = _ErrorBackoff("written to", directory, clock)
        self._read_errors = _ErrorBackoff("read", directory, clock)

    @classmethod
    def open(
        cls, directory: Path, limit_bytes: int, patience_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> "DiskTier":
        """Become the directory's owner. Raises TierError."""
        try:
            return cls(directory, limit_bytes, lock_directory(directory, patience_s), clock)
        except OSError as error:
            raise TierError(f"the disk KV tier at {directory} cannot be used: {error.strerror}") from error

    @property
    def used_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def is_writable(self) -> bool:
        return not self._write_errors.is_exhausted

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._records

    def scan(self) -> None:
        """Index what is there. Headers alone are read: a second or so for a hundred thousand blocks."""
        for path in sorted(self._directory.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            if number.isdecimal():
                self._next_number = max(self._next_number, int(number) + 1)
                try:
                    self._scan_segment(path)
                except OSError as error:
                    self._count(self._read_errors, error)
        with self._lock:
            self._make_room(0)
        if self._records:
            log.info("the disk KV tier holds %d blocks (%.1f MiB)", len(self), self.used_bytes / 2**20)

    def write(self, block_hash: bytes, block: memoryview, checksum: int) -> bool:
        """Append a block. False where it is there already, or cannot be written. One thread at a time."""
        size = _HEADER.size + len(block)
        if block_hash in self._records or not self.is_writable or size > self.limit_bytes:
            return False
        try:
            segment = self._segment_for(size)
            try:
                self._append(segment, block_hash, block, checksum)
            except OSError as error:
                os.ftruncate(self._active_fd, segment.num_bytes)  # no half a record before the next one
                # A try after a pause costs nothing that is still good: others would have it.
                if error.errno != errno.ENOSPC or self._write_errors.is_trying or not self._give_up_oldest():
                    raise
                self._append(segment, block_hash, block, checksum)  # others fill the disk: this much less is ours
        except OSError as error:
            self._count(self._write_errors, error)
            return False
        with self._lock:
            self._records[block_hash] = _BlockRecord(segment, segment.num_bytes + _HEADER.size, len(block), checksum)
            segment.hashes.add(block_hash)
            segment.num_bytes += size
        self._write_errors.succeed()
        return True

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """Fill `into` with the block's bytes and return their checksum. None where they are not what was written: then the block is forgotten."""
        with self._lock:
            record = self._records.get(block_hash)
            if record is not None:
                self._segments.move_to_end(record.segment)
        if record is None or record.num_bytes != len(into) or self._read_errors.is_exhausted:
            return None
        try:
            num_read = _read_at(record.segment.path, record.offset, into)
        except OSError as error:
            self._count(self._read_errors, error)
            self.forget([block_hash])
            return None
        if num_read < len(into) or crc32(into) != record.checksum:
            self.num_corrupt += 1
            log.warning("a block in %s does not agree with its checksum; it is recomputed", record.segment.path)
            self.forget([block_hash])
            return None
        self._read_errors.succeed()
        return record.checksum

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Make blocks unfindable, in this process and in later ones."""
        with self._lock:
            for block_hash in hashes:
                record = self._records.pop(block_hash, None)
                if record is None:
                    continue
                record.segment.hashes.discard(block_hash)
                try:
                    _blot_out(record)
                except OSError as error:
                    log.warning("a bad block cannot be blotted out of %s: %s", record.segment.path, error.strerror)

    def close(self) -> None:
        if self._active_fd >= 0:
            os.close(self._active_fd)
        self._active, self._active_fd = None, -1
        os.close(self._lock_fd)

    def _scan_segment(self, path: Path) -> None:
        segment = _Segment(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while segment.num_bytes < size:
                header = _read_header(os.pread(file.fileno(), _HEADER.size, segment.num_bytes))
                if header is None:
                    next_good = _find_record(file.fileno(), segment.num_bytes + 1, size)
                    if next_good is None:
                        break
                    self.num_corrupt += 1
                    log.warning("%s is damaged; bytes %d to %d are skipped", path, segment.num_bytes, next_good)
                    segment.num_bytes = next_good
                    continue
                block_hash, num_bytes, checksum, is_good = header
                offset = segment.num_bytes + _HEADER.size
                if offset + num_bytes > size:
                    break
                segment.num_bytes = offset + num_bytes
                if is_good and block_hash not in self._records:
                    with self._lock:
                        self._records[block_hash] = _BlockRecord(segment, offset, num_bytes, checksum)
                    segment.hashes.add(block_hash)
        if segment.num_bytes < size:  # torn by a crash, or damaged
            self.num_corrupt += 1
            log.warning("%s is damaged after %d of %d bytes; the rest is dropped", path, segment.num_bytes, size)
            os.truncate(path, segment.num_bytes)
        if segment.num_bytes == 0:
            path.unlink()
            return
        with self._lock:
            self._segments[segment] = None

    def _segment_for(self, size: int) -> _Segment:
        """Return the segment that the next record of `size` bytes goes to."""
        with self._lock:
            if self._active is None or self._active.num_bytes + size > max(self._segment_bytes, size):
                self._begin_segment()
            self._make_room(size)
            assert self._active is not None
            return self._active

    def _begin_segment(self) -> None:
        path = self._directory / f"segment-{self._next_number:08}.kv"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        if self._active_fd >= 0:
            os.close(self._active_fd)
        self._next_number += 1
        self._active, self._active_fd = _Segment(path), fd
        self._segments[self._active] = None

    def _make_room(self, size: int) -> None:
        while self.used_bytes + size > self.limit_bytes and self._drop_oldest():
            pass

    def _give_up_oldest(self) -> bool:
        with self._lock:
            return self._drop_oldest()

    def _drop_oldest(self) -> bool:
        oldest = next((segment for segment in self._segments if segment is not self._active), None)
        if oldest is None:
            return False
        del self._segments[oldest]
        for block_hash in oldest.hashes:
            del self._records[block_hash]
        oldest.path.unlink(missing_ok=True)
        return True

    def _append(self, segment: _Segment, block_hash: bytes, block: memoryview, checksum: int) -> None:
        header = _HEADER.pack(
            _MAGIC, crc32(_NAME.pack(block_hash, len(block), checksum)), block_hash, len(block), checksum
        )
        written = os.pwritev(self._active_fd, [header, block], segment.num_bytes)
        if written < len(header) + len(block):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, backoff: "_ErrorBackoff", error: OSError) -> None:
        self.num_errors += 1
        backoff.fail(error)


class _ErrorBackoff:
    """Counts errors in a row: after a few of them, there are pauses between one try and the next."""

    def __init__(self, what: str, directory: Path, clock: Callable[[], float]) -> None:
        self._what = what
        self._directory = directory
        self._clock = clock
        self._failures = 0
        self._next_try_at = 0.0

    @property
    def is_exhausted(self) -> bool:
        return self.is_trying and self._clock() < self._next_try_at

    @property
    def is_trying(self) -> bool:
        """Whether the next call is a try: it is not known to work."""
        return self._failures >= _PATIENCE

    def succeed(self) -> None:
        if self.is_trying:
            log.warning("the disk KV tier at %s is %s again", self._directory, self._what)
        self._failures = 0

    def fail(self, error: OSError) -> None:
        self._failures += 1
        if not self.is_trying:
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(10, self._failures - _PATIENCE))
        self._next_try_at = self._clock() + pause_s
        if self._failures == _PATIENCE:
            log.error(
                "the disk KV tier at %s is no longer %s after %d errors in a row, the last of them: %s; it is tried again from time to time",
                self._directory, self._what, _PATIENCE, error.strerror,
            )  # fmt: skip


class _Header(NamedTuple):
    block_hash: bytes
    num_bytes: int
    checksum: int
    is_good: bool  # False: blotted out


def _read_header(header: bytes) -> _Header | None:
    if len(header) < _HEADER.size:
        return None
    magic, own_checksum, block_hash, num_bytes, checksum = _HEADER.unpack(header)
    if own_checksum != crc32(_NAME.pack(block_hash, num_bytes, checksum)) or magic not in (_MAGIC, _BLOTTED):
        return None
    return _Header(block_hash, num_bytes, checksum, magic == _MAGIC)


_BLOTTED = b"PLno"


def _find_record(fd: int, start: int, size: int) -> int | None:
    """Return where the next whole record begins, from `start` on."""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content:
        while (start := content.find(_MAGIC, start)) >= 0:
            if _read_header(content[start : start + _HEADER.size]) is not None:
                return start
            start += 1
    return None


def _blot_out(record: _BlockRecord) -> None:
    """Mark a record as bad. It keeps its place, so that those behind it are still found."""
    fd = os.open(record.segment.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, _BLOTTED, record.offset - _HEADER.size)
    finally:
        os.close(fd)


def _read_at(path: Path, offset: int, into: memoryview) -> int:
    """Fill `into` and return how many bytes were read: fewer where the file has been cut."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.preadv(fd, [into], offset)
    finally:
        os.close(fd)
