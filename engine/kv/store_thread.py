"""The thread between a cluster's store and the host tier: it becomes a member, asks what is stored, and reads what a waiting sequence wants.

A store that keeps failing is left alone for a while, and one that hangs is asked nothing more until it answers: this is a cache. Knows which names
were found; refuses to know how the store keeps blocks (store_tier.py), and what is written to it (store_writer.py).
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice

from engine.kv.disk_tier import DiskTier
from engine.kv.error_backoff import ErrorBackoff
from engine.kv.host_tier import HostSlot, HostTier
from engine.kv.store_tier import BATCH_BYTES, StoreError, StoreTier
from engine.kv.store_writer import StoreWriter
from engine.kv.tier_read import TierRead
from engine.kv.tiers import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S
from engine.rates import TransferRate

log = logging.getLogger(__name__)

_MAX_FOUND = 1 << 16  # names, of 100 bytes or so
_LAST_JOB_S = 1.0
_RETRY_S = 1.0  # to become a member
_IDENTITY_S = 60.0  # a master that came back empty has another store's name


class StoreLookup:
    """Names that the store is asked for: what it has of them can be read afterwards."""

    num_blocks = 0

    def __init__(self, names: Sequence[bytes], deadline: float) -> None:
        self.names = names
        self.deadline = deadline
        self.is_done = False
        self.is_cancelled = False


class StoreRead(TierRead):
    """A chain on its way from the store."""

    def __init__(self, host: HostTier, hashes: Sequence[bytes], block_bytes: int, deadline: float) -> None:
        super().__init__(host, hashes, block_bytes)
        self.deadline = deadline


class StoreThread:
    def __init__(
        self,
        master: str,
        host: HostTier,
        disk: DiskTier | None = None,
        open_store: Callable[[str], StoreTier] = StoreTier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`disk`: nearer than the store; a chain may lie in both."""
        self.rate = TransferRate()
        self.identity = ""  # the store's own name; "": it has not said it
        self._identity_at = -math.inf  # when it was asked for that last
        self.writer = StoreWriter(host, f"the KV store of {master}", clock)
        self._host = host
        self._disk = disk
        self._clock = clock
        self._backoff = ErrorBackoff(f"the KV store of {master}", "read", clock)
        self._condition = threading.Condition()
        self._jobs: deque[StoreLookup | StoreRead] = deque()
        self._job: StoreLookup | StoreRead | None = None
        self._found: OrderedDict[bytes, None] = OrderedDict()  # names that the store said it has, the last of them last
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(master, open_store), name="kv-store", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    @property
    def num_errors(self) -> int:
        return self._backoff.num_errors + self.writer.num_errors

    @property
    def is_usable(self) -> bool:
        """Tell whether a sequence may wait for the store: it does not fail, and nothing that it was asked for is overdue."""
        with self._condition:
            oldest = self._job or (self._jobs[0] if self._jobs else None)
        is_stuck = oldest is not None and self._clock() > oldest.deadline
        return self.writer.is_open and not is_stuck and not self._backoff.is_exhausted

    def look_up(self, names: Sequence[bytes]) -> StoreLookup:
        lookup = StoreLookup(names, self._clock() + LOOKUP_TIMEOUT_S)
        self._begin(lookup)
        return lookup

    def read(self, hashes: Sequence[bytes], block_bytes: int) -> StoreRead:
        read = StoreRead(self._host, hashes, block_bytes, self._clock() + TRANSFER_TIMEOUT_S)
        self._begin(read)
        return read

    def offer(self, block_hash: bytes) -> None:
        """Offer a block of the host tier to the store."""
        if block_hash not in self._found:
            self.writer.offer(block_hash)

    def forget(self, names: Sequence[bytes]) -> None:
        """Forget bad content, here and for all other hosts."""
        for name in names:
            self._found.pop(name, None)
        self.writer.forget(names)

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            idle = self._condition.wait_for(lambda: not (self._jobs or self._job), timeout_s)
        return idle and self.writer.wait_until_idle(timeout_s)

    def close(self) -> None:
        """End. A thread whom the store does not answer is left behind."""
        self.writer.close()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_LAST_JOB_S)

    def _begin(self, job: StoreLookup | StoreRead) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify_all()

    def _run(self, master: str, open_store: Callable[[str], StoreTier]) -> None:
        store = self._open(master, open_store)
        if store is None:
            return
        self.writer.start(store)
        while True:
            with self._condition:
                self._job = None
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closing or self._jobs)
                if self._closing:
                    break
                job = self._job = self._jobs.popleft()
            try:
                if isinstance(job, StoreRead):
                    self._read(store, job)
                else:
                    self._look_up(store, job)
                self._backoff.succeed()
            except StoreError as error:
                self._backoff.fail(str(error))
            except Exception:  # a thread that ended would leave its readers waiting; each of them may compute instead
                log.exception("the KV store failed")
        if self.writer.has_ended:
            store.close()

    def _open(self, master: str, open_store: Callable[[str], StoreTier]) -> StoreTier | None:
        """Become a member, as soon as the master is there."""
        while True:
            if not self._backoff.is_exhausted:
                try:
                    return open_store(master)
                except StoreError as error:
                    self._backoff.fail(str(error))
            with self._condition:
                if self._condition.wait_for(lambda: self._closing, _RETRY_S):
                    return None

    def _look_up(self, store: StoreTier, lookup: StoreLookup) -> None:
        try:
            found = [] if lookup.is_cancelled else store.find(lookup.names)
            for name in found:
                self._found[name] = None
            while len(self._found) > _MAX_FOUND:
                self._found.popitem(last=False)
        finally:
            lookup.is_done = True
        if self._clock() - self._identity_at > _IDENTITY_S:
            self._identity_at = self._clock()
            self.identity = store.identity()

    def _read(self, store: StoreTier, read: StoreRead) -> None:
        started = self._clock()
        num_batched = max(1, BATCH_BYTES // (read.block_bytes + 64))
        names = iter(read.hashes)
        try:
            while not read.is_cancelled and (batch := list(islice(names, num_batched))):
                if not self._read_batch(store, read, batch):
                    return
        finally:
            if read.num_read:
                self.rate.add(read.num_read * read.block_bytes, self._clock() - started)
            read.finish()

    def _read_batch(self, store: StoreTier, read: StoreRead, names: Sequence[bytes]) -> bool:
        """Add to a read what can be had of a batch, up to the first block that cannot. False if there is one."""
        slots: list[tuple[HostSlot, bool]] = []  # pinned, and whether it is filled
        for name in names:
            slot = self._host.pin(name, is_hit=True)
            is_filled = slot is not None
            slot = slot or self._host.reserve(name, read.block_bytes)
            if slot is None:  # the tier is full of what is pinned, or another thread fills it just now
                break
            slots.append((slot, is_filled))
        missing = [slot for slot, is_filled in slots if not is_filled]
        checksums: dict[bytes, int | None] = {}
        try:
            checksums = self._fill(store, missing)
        finally:  # whatever goes wrong, no slot stays pinned
            num_sound = self._settle(read, slots, checksums)
        return num_sound == len(names)

    def _fill(self, store: StoreTier, slots: Sequence[HostSlot]) -> dict[bytes, int | None]:
        """Fill slots from the disk or the store, and return the checksum of each."""
        checksums: dict[bytes, int | None] = {}
        for slot in slots:
            if self._disk is not None and slot.block_hash in self._disk:
                checksums[slot.block_hash] = self._disk.read(slot.block_hash, slot.memory)
        rest = [slot for slot in slots if checksums.get(slot.block_hash) is None]
        if rest:
            names = [slot.block_hash for slot in rest]
            checksums.update(zip(names, store.read(names, [slot.memory for slot in rest]), strict=True))
        for name, checksum in checksums.items():
            if checksum is None:
                self._found.pop(name, None)
        return checksums

    def _settle(
        self, read: StoreRead, slots: Sequence[tuple[HostSlot, bool]], checksums: dict[bytes, int | None]
    ) -> int:
        """Commit what has come, and add it to the read up to the first that has not; return how much that is."""
        num_sound, is_whole = 0, True
        for slot, is_filled in slots:
            checksum = checksums.get(slot.block_hash)
            if not is_filled and checksum is None:
                is_whole = False
                self._host.abandon(slot)
                continue
            if not is_filled and checksum is not None:
                self._host.commit(slot, checksum)
            if is_whole:
                read.add(slot, is_new=not is_filled)
                num_sound += 1
            else:
                self._host.unpin([slot])
        return num_sound
