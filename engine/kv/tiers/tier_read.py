"""A chain's blocks on their way into the host tier from somewhere behind it, a disk, a store or another host, carried by a thread.

Knows slots, and who is to unpin what has come; refuses to know where it comes from (disk_thread.py, store_thread.py, peers/peer_thread.py).
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.kv.tier_protocol import Tier
from pilotlight.engine.kv.tiers.host_tier import HostSlot, HostTier

# Fills slots, and says in a dictionary, by name, the checksum of each that holds its block then.
Fill = Callable[[Sequence[HostSlot], dict[bytes, int]], None]


class TierBehind(Protocol):
    """A tier behind the host tier: a disk, or a store."""

    @property
    def kind(self) -> Tier: ...
    @property
    def rate(self) -> TransferRate:
        """The rate at which blocks are read."""

    @property
    def is_usable(self) -> bool:
        """Tell whether a sequence may wait for it: it does not fail, and nothing that it was asked for is overdue."""

    def __contains__(self, name: bytes) -> bool: ...

    def offer(self, name: bytes) -> None:
        """Keep a block of the host tier as well, when there is time."""

    def note_reuse(self, names: Sequence[bytes]) -> None:
        """Note that blocks were used again."""

    def forget(self, names: Sequence[bytes]) -> None:
        """Forget bad content: what is kept, waits to be written, or is being written now."""

    def read(self, names: Sequence[bytes], block_bytes: int) -> "TierRead":
        """Begin to read a chain to the host tier."""

    def wait_until_idle(self, timeout_s: float) -> bool: ...


class TierRead:
    """Blocks are pinned in the host tier as they come; whoever takes them unpins them."""

    def __init__(self, host: HostTier, hashes: Sequence[bytes], block_bytes: int, deadline: float = math.inf) -> None:
        """`deadline`: behind which whoever carries it is taken to be stuck."""
        self.hashes = list(hashes)
        self.deadline = deadline
        self.block_bytes = block_bytes
        self.slots: list[HostSlot] = []
        self.num_read = 0  # of these, those that were not in the host tier before
        self.is_done = False
        self.is_cancelled = False  # or taken
        self._host = host
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        return len(self.slots) if self.is_done else 0

    def bring(self, fill: Fill, num_at_once: int, rate: TransferRate, clock: Callable[[], float]) -> None:
        """Add the whole chain, so many blocks at once, up to the first that cannot be had or until the read is cancelled; then finish."""
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
        """Add the next blocks of the chain, those that the host tier lacks filled, up to the first that cannot be had. False if there is one.
        Whatever `fill` raises, no slot stays reserved."""
        slots: list[tuple[HostSlot, bool]] = []  # pinned, and whether it is to be filled
        for name in names:
            slot = self._host.pin(name, is_hit=True)
            is_new = slot is None
            slot = slot or self._host.reserve(name, self.block_bytes)
            if slot is None:  # the tier is full of what is pinned, or another thread fills it just now
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
        """Add a pinned slot, the next of the chain. From the thread that reads, before `finish`."""
        self.slots.append(slot)
        self.num_read += is_new

    def finish(self) -> None:
        """Note that no more comes."""
        with self._lock:
            self.is_done = True
            if self.is_cancelled:
                self._host.unpin(self.slots)

    def cancel(self) -> None:
        """End the read: what it has pinned, or still pins, is unpinned."""
        with self._lock:
            if self.is_cancelled:
                return
            self.is_cancelled = True
            if self.is_done:
                self._host.unpin(self.slots)

    def take(self) -> list[HostSlot]:
        """Return the pinned slots, which the caller unpins; of a read that is late, none."""
        with self._lock:
            if self.is_done and not self.is_cancelled:
                self.is_cancelled = True
                return self.slots
        self.cancel()
        return []

    def _settle(self, slots: Sequence[tuple[HostSlot, bool]], checksums: dict[bytes, int]) -> int:
        """Commit what has come, and add it up to the first that has not; return how much that is."""
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
