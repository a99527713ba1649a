"""A read of a chain's blocks from a disk, a store or another host into the host tier.

The sources are in disk_thread.py, store_thread.py and peers/peer_thread.py.
"""

import math
import threading
from collections.abc import Callable, Sequence

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier

# Fills slots, and adds the checksum of each filled slot to the dictionary, by name.
Fill = Callable[[Sequence[HostSlot], dict[bytes, int]], None]


class TierRead:
    """A read of a chain; its blocks are pinned in the host tier until the caller of `take` unpins them."""

    def __init__(self, host: HostTier, hashes: Sequence[bytes], block_bytes: int, deadline: float = math.inf) -> None:
        """Make a read. `deadline`: time after which the reading thread counts as stuck."""
        self.hashes = list(hashes)
        self.deadline = deadline
        self.block_bytes = block_bytes
        self.slots: list[HostSlot] = []
        self.num_read = 0  # number of `slots` that were not in the host tier before
        self.is_done = False
        self.is_cancelled = False  # cancelled or taken
        self._host = host
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        return len(self.slots) if self.is_done else 0

    def bring(self, fill: Fill, num_at_once: int, rate: TransferRate, clock: Callable[[], float]) -> None:
        """Read the chain in batches, up to its end, the first missing block or a cancel; then finish."""
        started = clock()
        try:
            for start in range(0, len(self.hashes), num_at_once):
                if self.is_cancelled or not self.add_next(self.hashes[start : start + num_at_once], fill):
                    break
        finally:
            if self.num_read:
                rate.add(self.num_read * self.block_bytes, clock() - started)
            self.finish()

    def add_next(self, names: Sequence[bytes], fill: Fill) -> bool:
        """Add the chain's next blocks; return False if one is not available, which ends the read.

        `fill` reads blocks that are not in the host tier. No slot stays reserved, even if `fill` raises.
        """
        slots: list[tuple[HostSlot, bool]] = []  # pinned slots, each with whether it must be filled
        for name in names:
            slot = self._host.pin(name, is_hit=True)
            is_new = slot is None
            slot = slot or self._host.reserve(name, self.block_bytes)
            if slot is None:  # all blocks of the tier are pinned, or another thread is filling this block
                break
            slots.append((slot, is_new))
        checksums: dict[bytes, int] = {}
        try:
            if missing := [slot for slot, is_new in slots if is_new]:
                fill(missing, checksums)
        finally:
            num_added = self._settle(slots, checksums)
        return num_added == len(names)

    def add(self, slot: HostSlot, *, is_new: bool) -> None:
        """Add the next pinned slot of the chain. Called by the reading thread, before `finish`."""
        self.slots.append(slot)
        self.num_read += is_new

    def finish(self) -> None:
        """Mark the read as done; unpin its blocks if it has been cancelled."""
        with self._lock:
            self.is_done = True
            if self.is_cancelled:
                self._host.unpin(self.slots)

    def cancel(self) -> None:
        """Cancel the read and unpin its blocks; if the read is not done yet, `finish` unpins them."""
        with self._lock:
            if self.is_cancelled:
                return
            self.is_cancelled = True
            if self.is_done:
                self._host.unpin(self.slots)

    def take(self) -> list[HostSlot]:
        """Return the pinned slots, which the caller unpins; if the read is not done, cancel it and return []."""
        with self._lock:
            if self.is_done and not self.is_cancelled:
                self.is_cancelled = True
                return self.slots
        self.cancel()
        return []

    def _settle(self, slots: Sequence[tuple[HostSlot, bool]], checksums: dict[bytes, int]) -> int:
        """Commit the filled slots and add those before the first unfilled one; return how many were added."""
        num_added, is_whole = 0, True
        for slot, is_new in slots:
            checksum = checksums.get(slot.block_hash)
            if is_new and checksum is None:
                is_whole = False
                self._host.abandon(slot)
                continue
            if is_new and checksum is not None:
                self._host.commit(slot, checksum)
            if is_whole:
                self.add(slot, is_new=is_new)
                num_added += 1
            else:
                self._host.unpin([slot])
        return num_added
