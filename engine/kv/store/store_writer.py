"""The thread that writes recently computed blocks to a cluster's store.

Writes wait in a bounded queue. They are dropped when it is full, or while the store is failing: this is only a cache. store_tier.py has the format.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from pilotlight.engine.kv.error_backoff import ErrorBackoff
from pilotlight.engine.kv.store.store_tier import StoredBlock, StoreError, StoreTier
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier

log = logging.getLogger(__name__)

_MAX_WRITES = 512
_LAST_WRITE_S = 1.0


class StoreWriter:
    def __init__(self, host: HostTier, what: str, clock: Callable[[], float], batch_bytes: int) -> None:
        self._host = host
        self._batch_bytes = batch_bytes
        self._backoff = ErrorBackoff(what, "written to", clock)
        self._condition = threading.Condition()
        self._writes: deque[bytes] = deque()
        self._writing: frozenset[bytes] = frozenset()
        self._unwanted: set[bytes] = set()  # names of blocks to remove from the store
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def num_errors(self) -> int:
        return self._backoff.num_errors

    def start(self, store: StoreTier) -> None:
        """Start to write to the store, which has just been joined."""
        thread = threading.Thread(target=self._run, args=(store,), name="kv-store-writer", daemon=True)
        thread.start()
        self._thread = thread  # set after the start, because `close` cannot join an unstarted thread

    def offer(self, name: bytes) -> None:
        if not self.is_open or self._backoff.is_exhausted:
            return
        with self._condition:
            if len(self._writes) < _MAX_WRITES:
                self._writes.append(name)
                self._condition.notify_all()

    def forget(self, names: Sequence[bytes]) -> None:
        """Remove bad blocks, whether they are stored, queued or being written now."""
        with self._condition:
            self._writes = deque(name for name in self._writes if name not in names)
            self._unwanted.update(names)
            self._condition.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: not (self._writes or self._writing or self._unwanted), timeout_s)

    def close(self) -> None:
        """Write offered blocks for up to `_LAST_WRITE_S`, then end the thread."""
        self.wait_until_idle(_LAST_WRITE_S)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WRITE_S)

    def _run(self, store: StoreTier) -> None:
        while True:
            with self._condition:
                self._writing = frozenset()
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closing or self._writes or self._unwanted)
                if self._closing:
                    return
                slots = self._next_slots()
                self._writing = frozenset([slot.block_hash for slot in slots])
            try:
                self._write(store, slots)
            except StoreError as error:
                self._backoff.fail(str(error))
            except Exception:  # keep the thread alive: without it nothing more would be stored
                log.exception("writing to the KV store failed")

    def _next_slots(self) -> list[HostSlot]:
        """Pin and return the next blocks to write; skip evicted ones, and all while the store is failing."""
        slots: list[HostSlot] = []
        while self._writes and sum(slot.file.slot_bytes for slot in slots) < self._batch_bytes // 2:
            name = self._writes.popleft()
            slot = None if self._backoff.is_exhausted else self._host.pin(name, is_hit=False)
            if slot is not None:
                slots.append(slot)
        return slots

    def _write(self, store: StoreTier, slots: Sequence[HostSlot]) -> None:
        try:
            sound = [slot for slot in slots if self._host.is_sound(slot)]
            if sound:
                store.write([StoredBlock(slot.block_hash, slot.memory, slot.checksum) for slot in sound])
                self._backoff.succeed()
        finally:
            self._host.unpin(slots)
            with self._condition:
                unwanted, self._unwanted = self._unwanted, set()
            store.remove(unwanted)
