"""The thread between a cluster's store and the host tier: it joins the store and reads blocks.

A failing store is not used for a while, and a hanging one gets no requests until it answers: this is only a cache. store_tier.py reads and writes the
store; store_writer.py chooses the blocks to write.
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.kv.error_backoff import ErrorBackoff
from pilotlight.engine.kv.store.store_tier import BATCH_BYTES, StoreError, StoreTier
from pilotlight.engine.kv.store.store_writer import StoreWriter
from pilotlight.engine.kv.tier_protocol import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S, Tier
from pilotlight.engine.kv.tiers.disk_thread import fill_from_disk
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead

log = logging.getLogger(__name__)

_MAX_FOUND = 1 << 16  # most names to remember, of about 100 bytes each
_LAST_JOB_S = 1.0
_RETRY_S = 1.0  # pause between attempts to join
_IDENTITY_S = 60.0  # interval of requests for the store's identity, which changes if the master restarts and is empty


class StoreLookup:
    """A lookup of names in the store; blocks whose names it finds can be read afterwards."""

    num_blocks = 0

    def __init__(self, names: Sequence[bytes], deadline: float) -> None:
        self.names = names
        self.deadline = deadline
        self.is_done = False
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class StoreThread:
    kind: Tier = "store"

    def __init__(
        self,
        master: str,
        host: HostTier,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_found: int = _MAX_FOUND,
        retry_s: float = _RETRY_S,
        batch_bytes: int = BATCH_BYTES,
        join: Callable[[str], StoreTier] = StoreTier.join,
    ) -> None:
        """Start the threads. `disk`: read before the store, because a chain may have blocks in both.

        `max_found`: most names to remember; `retry_s`: pause between attempts to join; `batch_bytes`: most bytes per call of the store.
        """
        self.rate = TransferRate()
        self.num_corrupt = 0
        self.identity = ""  # the store's random name; empty until known
        self._identity_at = -math.inf  # time at which the identity was last requested
        self.writer = StoreWriter(host, f"the KV store of {master}", clock, batch_bytes)
        self._host = host
        self._disk = disk
        self._clock = clock
        self._max_found = max_found
        self._retry_s = retry_s
        self._batch_bytes = batch_bytes
        self._join = join
        self._backoff = ErrorBackoff(f"the KV store of {master}", "read", clock)
        self._condition = threading.Condition()
        self._jobs: deque[StoreLookup | TierRead] = deque()
        self._job: StoreLookup | TierRead | None = None
        self._found: OrderedDict[bytes, None] = OrderedDict()  # names found in the store, the most recent last
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(master,), name="kv-store", daemon=True)
        self._thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    @property
    def num_errors(self) -> int:
        return self._backoff.num_errors + self.writer.num_errors

    @property
    def is_usable(self) -> bool:
        """True if a sequence may wait for the store: it is joined, is not failing, and no request is overdue."""
        with self._condition:
            oldest = self._job or (self._jobs[0] if self._jobs else None)
        is_stuck = oldest is not None and self._clock() > oldest.deadline
        return self.writer.is_open and not is_stuck and not self._backoff.is_exhausted

    def look_up(self, names: Sequence[bytes]) -> StoreLookup:
        lookup = StoreLookup(names, self._clock() + LOOKUP_TIMEOUT_S)
        self._begin(lookup)
        return lookup

    def read(self, hashes: Sequence[bytes], block_bytes: int) -> TierRead:
        read = TierRead(self._host, hashes, block_bytes, self._clock() + TRANSFER_TIMEOUT_S)
        self._begin(read)
        return read

    def offer(self, block_hash: bytes) -> None:
        """Offer a block of the host tier to the store."""
        if block_hash not in self._found:
            self.writer.offer(block_hash)

    def note_reuse(self, names: Sequence[bytes]) -> None:
        """Do nothing, because the store alone decides how long it keeps blocks."""

    def forget(self, names: Sequence[bytes]) -> None:
        """Remove bad blocks from the store, for all hosts."""
        for name in names:
            self._found.pop(name, None)
        self.writer.forget(names)

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            idle = self._condition.wait_for(lambda: not (self._jobs or self._job), timeout_s)
        return idle and self.writer.wait_until_idle(timeout_s)

    def close(self) -> None:
        """End the threads; a thread that still waits for the store is abandoned."""
        self.writer.close()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_LAST_JOB_S)

    def _begin(self, job: StoreLookup | TierRead) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify_all()

    def _run(self, master: str) -> None:
        store = self._open(master)
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
                if isinstance(job, StoreLookup):
                    self._look_up(store, job)
                else:
                    num_at_once = max(1, self._batch_bytes // (job.block_bytes + 64))
                    job.bring(partial(self._fill, store), num_at_once, self.rate, self._clock)
            except StoreError as error:
                self._backoff.fail(str(error))
            except Exception:  # keep the thread alive: without it later readers would wait in vain
                log.exception("the KV store failed")
        if self.writer.has_ended:
            store.close()

    def _open(self, master: str) -> StoreTier | None:
        """Join the store, with retries until the master answers; return None if `close` is called first."""
        while True:
            if not self._backoff.is_exhausted:
                try:
                    return self._join(master)
                except StoreError as error:
                    self._backoff.fail(str(error))
            with self._condition:
                if self._condition.wait_for(lambda: self._closing, self._retry_s):
                    return None

    def _look_up(self, store: StoreTier, lookup: StoreLookup) -> None:
        try:
            if lookup.is_cancelled:
                return
            for name in store.find(lookup.names):
                self._found[name] = None
            while len(self._found) > self._max_found:
                self._found.popitem(last=False)
        finally:
            lookup.is_done = True
        self._backoff.succeed()
        if self._clock() - self._identity_at > _IDENTITY_S:
            self._identity_at = self._clock()
            self.identity = store.identity()

    def _fill(self, store: StoreTier, slots: Sequence[HostSlot], checksums: dict[bytes, int]) -> None:
        """Fill slots from the disk, and the rest from the store."""
        if self._disk is not None:
            fill_from_disk(self._disk, slots, checksums)
        if rest := [slot for slot in slots if slot.block_hash not in checksums]:
            names = [slot.block_hash for slot in rest]
            found = store.read(names, [slot.memory for slot in rest])
            self.num_corrupt = store.num_corrupt
            self._backoff.succeed()
            for name, checksum in zip(names, found, strict=True):
                if checksum is None:
                    self._found.pop(name, None)
                else:
                    checksums[name] = checksum
