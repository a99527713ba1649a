"""The disk tier: KV blocks in append-only segments of one directory, by hash, with checksums.

The least recently used segment is evicted as a whole. A block that a crash has torn is computed again. A disk that keeps failing is not used for a
while, and then tried again. The tier is thread-safe, and independent of models and tokens. disk_thread.py uses it for the engine.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from isal.isal_zlib import crc32

from pilotlight.engine.kv.error_backoff import ErrorBackoff
from pilotlight.engine.kv.tier_protocol import TierError
from pilotlight.engine.kv.tiers.segment_file import HEADER_BYTES, BlockRecord, Segment
from pilotlight.engine.kv.tiers.slot_file import lock_directory
from pilotlight.support.disk_errors import is_disk_full
from pilotlight.support.file_calls import FILE_CALLS, FileCalls

log = logging.getLogger(__name__)

_SEGMENTS = 16  # least number of segments for which the limit has room; so at most 1/16 of the cache is evicted at once
_MAX_SEGMENT_BYTES = 256 << 20


class DiskTier:
    """The disk tier. Open it with `DiskTier.open`; `scan` then finds the blocks of an earlier process."""

    def __init__(
        self, directory: Path, limit_bytes: int, lock_fd: int, clock: Callable[[], float], files: FileCalls
    ) -> None:
        self.limit_bytes = limit_bytes
        self.num_corrupt = 0
        self._directory = directory
        self._lock_fd = lock_fd
        self._files = files
        self._lock = threading.Lock()
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, limit_bytes // _SEGMENTS)
        self._segments: OrderedDict[Segment, None] = OrderedDict()  # the least recently used first
        self._records: dict[bytes, BlockRecord] = {}
        self._active: Segment | None = None  # the segment to which one thread writes
        self._next_number = 0
        self._write_errors = ErrorBackoff(f"the disk KV tier at {directory}", "written to", clock)
        self._read_errors = ErrorBackoff(f"the disk KV tier at {directory}", "read", clock)

    @classmethod
    def open(
        cls,
        directory: Path,
        limit_bytes: int,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        files: FileCalls = FILE_CALLS,
    ) -> Self:
        """Lock the directory and open the tier in it, still without blocks. Raises TierError."""
        try:
            return cls(directory, limit_bytes, lock_directory(directory, patience_s), clock, files)
        except OSError as error:
            raise TierError(f"the disk KV tier at {directory} cannot be used: {error.strerror}") from error

    @property
    def used_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def num_errors(self) -> int:
        return self._write_errors.num_errors + self._read_errors.num_errors

    @property
    def is_writable(self) -> bool:
        return not self._write_errors.is_exhausted

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._records

    def scan(self) -> None:
        """Index existing blocks, reading only headers: about a second for a hundred thousand blocks."""
        for path in sorted(self._directory.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            if number.isdecimal():
                self._next_number = max(self._next_number, int(number) + 1)
                try:
                    self._scan_segment(path)
                except OSError as error:
                    self._read_errors.fail(error.strerror or str(error))
        with self._lock:
            self._make_room(0)
        if self._records:
            log.info("the disk KV tier holds %d blocks (%.1f MiB)", len(self), self.used_bytes / 2**20)

    def write(self, block_hash: bytes, block: memoryview, checksum: int) -> bool:
        """Append a block; return False if it exists already or cannot be written. Only one thread may write."""
        size = HEADER_BYTES + len(block)
        if block_hash in self._records or not self.is_writable or size > self.limit_bytes:
            return False
        try:
            segment = self._segment_for(size)
            try:
                record = segment.append(block_hash, block, checksum)
            except OSError as error:
                segment.drop_torn()
                # A retry after a pause must not evict valid blocks, because other users of the disk would take the space.
                if not is_disk_full(error) or self._write_errors.is_trying or not self._give_up_oldest():
                    raise
                # Other users fill the disk, so the tier has to stay below its limit.
                record = segment.append(block_hash, block, checksum)
        except OSError as error:
            self._write_errors.fail(error.strerror or str(error))
            return False
        with self._lock:
            self._records[block_hash] = record
            segment.hashes.add(block_hash)
            segment.num_bytes += size
        self._write_errors.succeed()
        return True

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """Fill `into` with the block's bytes; return their checksum, or None if they are missing or damaged.

        A damaged block is dropped.
        """
        with self._lock:
            record = self._records.get(block_hash)
            if record is not None:
                self._segments.move_to_end(record.segment)
        if record is None or record.num_bytes != len(into) or self._read_errors.is_exhausted:
            return None
        try:
            num_read = record.read(into)
        except OSError as error:
            self._read_errors.fail(error.strerror or str(error))
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
                    record.blot_out()
                except OSError as error:
                    log.warning("a bad block cannot be marked in %s: %s", record.segment.path, error.strerror)

    def close(self) -> None:
        if self._active is not None:
            self._active.close()
        self._active = None
        os.close(self._lock_fd)

    def _scan_segment(self, path: Path) -> None:
        segment = Segment(path, files=self._files)
        # Added before the scan: blocks that the scan has found can be read at once, even if the rest of the segment cannot.
        self._segments[segment] = None
        try:
            for found in segment.scan():
                if found is None:
                    self.num_corrupt += 1
                    continue
                block_hash, record = found
                with self._lock:
                    if block_hash not in self._records:
                        self._records[block_hash] = record
                        segment.hashes.add(block_hash)
        finally:
            if not segment.num_bytes:
                del self._segments[segment]

    def _segment_for(self, size: int) -> Segment:
        """Return the segment for the next record of `size` bytes; evict segments to make room for it."""
        with self._lock:
            if self._active is None or self._active.num_bytes + size > max(self._segment_bytes, size):
                self._begin_segment()
            self._make_room(size)
            assert self._active is not None
            return self._active

    def _begin_segment(self) -> None:
        segment = Segment.create(self._directory / f"segment-{self._next_number:08}.kv", self._files)
        if self._active is not None:
            self._active.close()
        self._next_number += 1
        self._active = segment
        self._segments[segment] = None

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
