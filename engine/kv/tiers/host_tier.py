"""The host tier: complete KV blocks in shared memory that outlives the engine process, found by hash.

All models of a host share one limit. A block takes a slot in the file for its size. The caller of `open` chooses the directory and removes it; a
second owner is refused. The tier is thread-safe, and independent of models and tokens.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from isal.isal_zlib import crc32

from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.device.slot_memory import CPU_MEMORY, SlotMemory
from pilotlight.engine.kv.recency import SegmentedOrder
from pilotlight.engine.kv.tier_protocol import TierError
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.slot_file import SlotFile, lock_directory
from pilotlight.engine.kv.tiers.slot_space import SlotSpace

log = logging.getLogger(__name__)


class HostTier:
    """The host tier. Open it with `HostTier.open`."""

    def __init__(
        self, directory: Path, limit_bytes: int, lock_fd: int, clock: Callable[[], float], memory: SlotMemory
    ) -> None:
        self.space = SlotSpace(directory, limit_bytes, memory)
        self.num_corrupt = 0
        self.num_evicted = 0
        self.directory = directory
        self._lock_fd = lock_fd
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[bytes, HostSlot] = {}  # slots that are written or being written, by block hash
        self._order: SegmentedOrder[bytes] = SegmentedOrder(limit_bytes)  # hashes of written slots that are not pinned
        self._num_filling = 0  # slots that are neither committed nor abandoned

    @classmethod
    def open(
        cls,
        directory: Path,
        limit_bytes: int,
        clock: Callable[[], float] = time.time,
        patience_s: float = 0.0,
        memory: SlotMemory = CPU_MEMORY,
    ) -> "HostTier":
        """Open the tier with the blocks that an earlier process left in the directory. Raises TierError.

        The directory's lock is awaited for up to `patience_s`.
        """
        try:
            lock_fd = lock_directory(directory, patience_s)
        except OSError as error:
            raise TierError(f"the host KV tier at {directory} cannot be used: {error.strerror}") from error
        tier = cls(directory, limit_bytes, lock_fd, clock, memory)
        try:
            tier._recover()
        except OSError as error:
            tier.close()
            raise TierError(f"the host KV tier at {directory} cannot be used: {error.strerror}") from error
        return tier

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        """The number of slots that are pinned or being filled."""
        with self._lock:
            return len(self._slots) - len(self._order)

    def __contains__(self, block_hash: bytes) -> bool:
        slot = self._slots.get(block_hash)
        return slot is not None and slot.is_written

    def add_size(self, block_bytes: int) -> RegisteredMemory:
        """Make slots for blocks of this size, and return their memory. Raises TierError if not even one fits."""
        with self._lock:
            try:
                return self.space.file_of(block_bytes).registered
            except OSError as error:
                raise TierError(f"the host KV tier at {self.directory} cannot grow: {error.strerror}") from error

    def reserve(self, block_hash: bytes, block_bytes: int) -> HostSlot | None:
        """Return a pinned slot, which the caller fills and then commits or abandons.

        Returns None if the block exists or is being filled, or if nothing can be evicted for it.
        """
        with self._lock:
            if block_hash in self._slots:
                return None
            file = self.space.file_of(block_bytes)
            index = self._take_slot(file)
            if index is None:
                return None
            slot = self._slots[block_hash] = HostSlot(file, index, block_hash, pins=1)
            self._num_filling += 1
            return slot

    def commit(self, slot: HostSlot, checksum: int) -> None:
        """Publish a slot whose bytes are complete. It stays pinned."""
        with self._lock:
            self._num_filling -= 1
            slot.checksum = checksum
            slot.is_verified = True
            if not slot.is_forgotten:
                slot.is_written = True
                slot.file.commit(slot.index, slot.block_hash, checksum, self._clock())

    def abandon(self, slot: HostSlot) -> None:
        """Free a slot that was not filled."""
        with self._lock:
            self._num_filling -= 1
            self._forget(slot)
            self._unpin(slot)

    def pin(self, block_hash: bytes, *, is_hit: bool) -> HostSlot | None:
        """Pin and return the block's slot, or None if there is none. `is_hit`: count it as a reuse."""
        with self._lock:
            slot = self._slots.get(block_hash)
            if slot is None or not slot.is_written:
                return None
            if slot.pins == 0:
                slot.is_protected = self._order.remove(block_hash)
            slot.pins += 1
            if is_hit:
                slot.is_protected = True
                slot.file.note_use(slot.index, self._clock())
            return slot

    def pin_prefix(self, hashes: Iterable[bytes]) -> list[HostSlot]:
        """Pin and return the blocks of a chain, as hits, up to the first that is missing."""
        pinned = []
        for block_hash in hashes:
            slot = self.pin(block_hash, is_hit=True)
            if slot is None:
                break
            pinned.append(slot)
        return pinned

    def unpin(self, slots: Sequence[HostSlot]) -> None:
        """Unpin a chain so that its tail is evicted before its head, without which it is useless."""
        with self._lock:
            for slot in reversed(slots):
                self._unpin(slot)

    def is_sound(self, slot: HostSlot) -> bool:
        """Verify the checksum of a pinned slot once; return False, and drop the block, if it does not match."""
        if slot.is_verified:
            return True
        sound = crc32(slot.memory) == slot.checksum
        with self._lock:
            slot.is_verified = sound
            if not sound and not slot.is_forgotten:
                self.num_corrupt += 1
                log.warning("a block of the host KV tier does not agree with its checksum; it is recomputed")
                self._forget(slot)
        return sound

    def refresh(self, hashes: Sequence[bytes]) -> None:
        """Reorder a chain, without a hit, so that its tail is evicted before its head."""
        with self._lock:
            for block_hash in reversed(hashes):
                if block_hash in self._order:
                    self._order.refresh(block_hash)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Record that a chain was used on the device, which counts as a hit here."""
        with self._lock:
            now = self._clock()
            for block_hash in reversed(hashes):
                if block_hash in self._order:
                    self._order.remove(block_hash)
                    slot = self._slots[block_hash]
                    slot.file.note_use(slot.index, now)
                    self._order.add(block_hash, slot.file.stride, protected=True)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop blocks whose content is bad."""
        with self._lock:
            for block_hash in hashes:
                if slot := self._slots.get(block_hash):
                    self._forget(slot)

    def close(self) -> None:
        """Close the files, which stay for the next owner.

        If a hanging thread may still write to them, their lock is kept until the process ends.
        """
        with self._lock:
            if self._num_filling:
                log.warning("%d blocks of the host KV tier are still being filled", self._num_filling)
            else:
                os.close(self._lock_fd)  # unlock before unregistering the memory, which takes a second for 64 GiB
            self._slots.clear()
            self.space.close()

    def _recover(self) -> None:
        for (index, block_hash, checksum, _), file in sorted(self.space.find(), key=lambda pair: pair[0].last_use):
            if block_hash in self._slots:  # the same block in two sizes, of which models use only one
                self.space.release(file, index)
                continue
            self._slots[block_hash] = HostSlot(file, index, block_hash, checksum, is_written=True)
            self._order.add(block_hash, file.stride)
        if self.space.num_corrupt:
            self.num_corrupt += self.space.num_corrupt
            log.warning("the host KV tier has %d damaged headers; their blocks are recomputed", self.space.num_corrupt)
        if self._slots:
            used_mib = self.space.used_bytes / 2**20
            log.info("the host KV tier holds %d blocks (%.1f MiB) of an earlier process", len(self), used_mib)

    def _take_slot(self, file: SlotFile) -> int | None:
        """Return an empty slot of `file`, evicting blocks if needed; None if that is impossible."""
        while not self.space.has_room(file):
            if not self._evict(file):
                return None
        index = self.space.take(file)
        if index is None:  # the file system is full and `take` has lowered the limit, so the next call evicts
            self._order.resize(self.space.limit_bytes)
        return index

    def _evict(self, wanting: SlotFile) -> bool:
        oldest = self._order.oldest()
        if oldest is None:
            return False
        self._order.remove(oldest)
        slot = self._slots.pop(oldest)
        self.num_evicted += 1
        self.space.release(slot.file, slot.index, keeps_pages=slot.file is wanting)
        return True

    def _forget(self, slot: HostSlot) -> None:
        """Make a slot unfindable, and free it now, or once it is no longer pinned."""
        if slot.is_forgotten:
            return
        del self._slots[slot.block_hash]
        slot.is_forgotten = True
        slot.file.clear(slot.index)
        if slot.pins == 0:
            self._order.remove(slot.block_hash)
            self.space.release(slot.file, slot.index)

    def _unpin(self, slot: HostSlot) -> None:
        assert slot.pins > 0, "a slot was unpinned more often than it was pinned"
        slot.pins -= 1
        if slot.pins:
            return
        if slot.is_forgotten:
            self.space.release(slot.file, slot.index)
        else:
            self._order.add(slot.block_hash, slot.file.stride, slot.is_protected)
