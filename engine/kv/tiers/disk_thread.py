"""The thread between host tier and disk: it writes recent blocks, and reads for waiting sequences.

Reads go first. Writes wait in bounded queues and are dropped when these are full: this is only a cache, and a disk that is slower than the engine
must not delay it. Reused blocks are written before blocks used once, and are offered again if they were dropped. So if more blocks are computed than
may be written, the disk has those that are likely to be needed. This module is independent of how the tiers keep their blocks.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.kv.tier_protocol import TRANSFER_TIMEOUT_S, Tier
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead

log = logging.getLogger(__name__)

_MAX_WRITES = 512  # most blocks per queue: with blocks of 2 MiB a fast disk writes them in a second
_BURST_S = 1.0  # seconds of unused bandwidth that may be used at once
_LAST_WRITE_S = 1.0


class DiskThread:
    kind: Tier = "disk"

    def __init__(
        self,
        disk: DiskTier,
        host: HostTier,
        clock: Callable[[], float] = time.monotonic,
        *,
        write_bytes_per_s: float = math.inf,
        max_writes: int = _MAX_WRITES,
    ) -> None:
        """Start the thread. `write_bytes_per_s`: upper bound, to limit load and wear of the disk.

        `max_writes`: most blocks per queue.
        """
        self.disk = disk
        self.rate = TransferRate()
        self.num_dropped = 0  # writes dropped because the queue was full
        self._host = host
        self._clock = clock
        self._condition = threading.Condition()
        self.write_bytes_per_s = write_bytes_per_s
        self._max_writes = max_writes
        self._may_write_at = clock()
        self._writes: dict[bytes, None] = {}  # blocks used once, the oldest first
        self._reused: dict[bytes, None] = {}
        self._reads: deque[TierRead] = deque()
        self._reading: TierRead | None = None
        self._writing = b""
        self._is_unwanted = False  # whether the block that is being written has turned out to be bad
        self._is_busy = True  # True at first, because the thread starts with the scan
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self.disk

    @property
    def is_usable(self) -> bool:
        """True if a sequence may wait for the disk: no read is overdue."""
        with self._condition:
            oldest = self._reading or (self._reads[0] if self._reads else None)
        return oldest is None or self._clock() <= oldest.deadline

    def offer(self, block_hash: bytes) -> None:
        """Offer a block of the host tier to the disk."""
        if not self.disk.is_writable or block_hash in self.disk:
            return
        with self._condition:
            if len(self._writes) >= self._max_writes:
                self.num_dropped += 1
                return
            if block_hash not in self._reused:
                self._writes[block_hash] = None
            self._condition.notify_all()

    def note_reuse(self, hashes: Sequence[bytes]) -> None:
        """Queue reused blocks that the disk does not have; they are written before blocks used once."""
        missing = [block_hash for block_hash in hashes if block_hash not in self.disk]
        if not missing or not self.disk.is_writable:
            return
        with self._condition:
            for block_hash in missing[: self._max_writes - len(self._reused)]:
                self._writes.pop(block_hash, None)
                self._reused[block_hash] = None
            self._condition.notify_all()

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop bad blocks, whether they are on the disk, queued or being written now."""
        with self._condition:
            for block_hash in hashes:
                self._writes.pop(block_hash, None)
                self._reused.pop(block_hash, None)
            self._is_unwanted |= self._writing in hashes
        self.disk.forget(hashes)

    def read(self, hashes: Sequence[bytes], block_bytes: int) -> TierRead:
        read = TierRead(self._host, hashes, block_bytes, self._clock() + TRANSFER_TIMEOUT_S)
        with self._condition:
            self._reads.append(read)
            self._condition.notify_all()
        return read

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: not (self._writes or self._reused or self._reads or self._is_busy), timeout_s
            )

    def close(self) -> None:
        """Write offered blocks for up to `_LAST_WRITE_S`, without a bandwidth limit, then end the thread."""
        with self._condition:
            self.write_bytes_per_s, self._may_write_at = math.inf, -math.inf
            self._condition.notify_all()
        self.wait_until_idle(_LAST_WRITE_S)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_LAST_WRITE_S)
        if not self._thread.is_alive():
            self.disk.close()

    def _run(self) -> None:
        try:
            self.disk.scan()
        except Exception:
            log.exception("the content of the disk KV tier cannot be read")
        while True:
            with self._condition:
                if self._is_unwanted:
                    self.disk.forget([self._writing])
                self._is_busy, self._reading, self._writing, self._is_unwanted = False, None, b"", False
                self._condition.notify_all()
                self._wait_for_work()
                if self._closing:
                    return
                self._is_busy = True
                read = self._reading = self._reads.popleft() if self._reads else None
                block_hash = self._writing = self._next_write() if read is None else b""
            try:
                if read is not None:
                    read.bring(partial(fill_from_disk, self.disk), 1, self.rate, self._clock)
                else:
                    self._write(block_hash)
            except Exception:  # keep the thread alive: without it later readers would wait in vain
                log.exception("the disk KV tier failed")

    def _wait_for_work(self) -> None:
        while not (self._closing or self._reads):
            late_s = self._may_write_at - self._clock()
            has_writes = bool(self._writes or self._reused)
            if has_writes and late_s <= 0:
                return
            self._condition.wait(late_s if has_writes else None)

    def _next_write(self) -> bytes:
        queue = self._reused or self._writes
        block_hash = next(iter(queue))
        del queue[block_hash]
        return block_hash

    def _write(self, block_hash: bytes) -> None:
        slot = self._host.pin(block_hash, is_hit=False)
        if slot is None:
            return  # the block has left the host tier
        try:
            if self._host.is_sound(slot) and self.disk.write(block_hash, slot.memory, slot.checksum):
                began = max(self._may_write_at, self._clock() - _BURST_S)
                self._may_write_at = began + len(slot.memory) / self.write_bytes_per_s
        finally:
            self._host.unpin([slot])


def fill_from_disk(disk: DiskTier, slots: Sequence[HostSlot], checksums: dict[bytes, int]) -> None:
    """Fill slots with blocks from the disk; a `Fill` of tier_read.py."""
    for slot in slots:
        checksum = disk.read(slot.block_hash, slot.memory)
        if checksum is not None:
            checksums[slot.block_hash] = checksum
