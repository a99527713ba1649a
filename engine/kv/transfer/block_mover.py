"""Copies of blocks between one model's device cache and the host tier, and their measured rates.

host_thread.py has the thread and decides when to copy.
"""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from isal.isal_zlib import crc32

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.transfer.block_copier import BlockCopier


class KeptSlots:
    """Slots pinned for one owner, also those that are filled later. Thread-safe."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._slots: list[HostSlot] = []
        self._is_done = False

    def add(self, slots: Sequence[HostSlot]) -> None:
        """Keep pinned slots, or unpin them if `unpin` has been called already."""
        with self._lock:
            if not self._is_done:
                self._slots += slots
                return
        self._host.unpin(slots)

    def unpin(self) -> None:
        """Unpin all slots, including those added later."""
        with self._lock:
            self._is_done = True
            slots, self._slots = self._slots, []
        self._host.unpin(slots)


class BlockStore(NamedTuple):
    """A block of the device to be copied to the host tier."""

    block: int
    block_hash: bytes
    mark: object  # the copier's mark after which the block's content is complete
    kept: KeptSlots | None = None  # the pins of the owner for whom the slot stays pinned after the copy


class HostFetch:
    """A transfer of a chain's blocks from the host tier to the device."""

    def __init__(self, slots: list[HostSlot], blocks: Sequence[int], mark: object, started: float) -> None:
        self.slots = slots  # pinned until the fetch is done
        self.blocks = list(blocks)
        self.mark = mark
        self.started = started
        self.num_blocks = 0
        self.is_done = False
        self.is_cancelled = False


class BlockMover:
    def __init__(self, host: HostTier, offer: Callable[[bytes], None], copier: BlockCopier, block_bytes: int) -> None:
        """Make a mover. `offer`: offers a block of the host tier to the tiers beyond it.

        Raises TierError if a block does not fit the host tier.
        """
        host.add_size(block_bytes)
        self.store_rate = TransferRate()
        self.fetch_rate = TransferRate()
        self.num_lost = 0
        self.store_batch = max(1, copier.store_bytes // block_bytes)  # number of blocks
        self.fetch_batch = max(1, copier.fetch_bytes // block_bytes)
        self._host = host
        self._offer = offer
        self._copier = copier
        self._block_bytes = block_bytes

    def mark(self) -> object:
        """Return the copier's mark of all device work launched so far."""
        return self._copier.mark()

    def begin_fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> HostFetch:
        return HostFetch(self._host.pin_prefix(hashes), blocks, self.mark(), time.monotonic())

    def end_fetch(self, fetch: HostFetch) -> None:
        self._host.unpin(fetch.slots)
        fetch.is_done = True

    def fetch(self, fetch: HostFetch) -> None:
        """Copy the slots to the device, up to the first damaged one or until the fetch is cancelled."""
        for start in range(0, len(fetch.slots), self.fetch_batch):
            if fetch.is_cancelled:
                return
            slots = fetch.slots[start : start + self.fetch_batch]
            sound = self._num_sound(slots)
            views = [slot.memory for slot in slots[:sound]]
            self._copier.fetch(fetch.blocks[start : start + sound], views, fetch.mark)
            fetch.num_blocks += sound
            if sound < len(slots):
                self.num_lost += 1
                break
        self.fetch_rate.add(fetch.num_blocks * self._block_bytes, time.monotonic() - fetch.started)

    def store(self, stores: Sequence[BlockStore], on_copied: Callable[[], None] = lambda: None) -> None:
        """Copy blocks to the host tier, and offer them to the disk and the store.

        `on_copied` is called when the device's blocks may be overwritten.
        """
        started = time.monotonic()
        reserved = [(one, self._host.reserve(one.block_hash, self._block_bytes)) for one in stores]
        wanted = [(one, slot) for one, slot in reserved if slot is not None]
        slots = [slot for _, slot in wanted]
        copied = False
        try:
            if wanted:
                blocks = [one.block for one, _ in wanted]
                last = wanted[-1][0]  # the block with the latest mark
                self._copier.store(blocks, [slot.memory for slot in slots], last.mark)
            copied = True
        finally:
            if not copied:
                for slot in slots:
                    self._host.abandon(slot)
        on_copied()
        for (one, slot), checksum in zip(wanted, self._copier.map(_checksum, slots), strict=True):
            self._host.commit(slot, checksum)
            self._offer(slot.block_hash)
            if one.kept is None:
                self._host.unpin([slot])
            else:
                one.kept.add([slot])
        if slots:
            self.store_rate.add(len(slots) * self._block_bytes, time.monotonic() - started)

    def _num_sound(self, slots: Sequence[HostSlot]) -> int:
        """Return the number of slots before the first damaged one."""
        unread = [slot for slot in slots if not slot.is_verified]
        all(self._copier.map(self._host.is_sound, unread))
        return sum(1 for _ in takewhile(lambda slot: slot.is_verified, slots))


def _checksum(slot: HostSlot) -> int:
    return crc32(slot.memory)
