"""The thread that copies blocks between device cache and host tier of a model, fetches before stores.

A queued store does not hold its block: a block that is reused before its copy is not stored, so stores can neither leak nor exhaust blocks. The
engine's thread waits only if it must overwrite a block that is being copied, and then for one small batch. block_mover.py copies a batch;
tiered_cache.py decides whether a copy pays off.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable

from pilotlight.engine.kv.transfer.block_mover import BlockMover, BlockStore, HostFetch

log = logging.getLogger(__name__)

_LAST_STORES_S = 2.0  # limit for a model's last stores, while no other model of the host runs; enough for 20 GiB from a GPU, or 4 GiB on a CPU
_LAST_COPY_S = 10.0


class HostThread:
    def __init__(self, mover: BlockMover) -> None:
        self.is_broken = False  # the device has failed, and nothing is copied any more
        self._mover = mover
        self._condition = threading.Condition()
        self._stores: dict[int, BlockStore] = {}  # queued stores, by block
        self._copying: frozenset[int] = frozenset()  # device blocks that a store is reading now
        self._is_storing = False
        self._num_batches = 0
        self._fetches: deque[HostFetch] = deque()
        self._fetching: HostFetch | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()

    def store(self, stores: Iterable[BlockStore], *, first: bool = False) -> None:
        """Queue blocks to be stored. `first`: put them before all queued ones."""
        queued = {one.block: one for one in stores}
        with self._condition:
            earlier = {block: one for block, one in self._stores.items() if block not in queued}
            self._stores = queued | earlier if first else earlier | queued
            self._condition.notify_all()

    def drop(self, block: int) -> None:
        """Remove a block from the queue, or wait until its running copy has ended."""
        with self._condition:
            self._stores.pop(block, None)
            while block in self._copying:
                self._condition.wait()

    def fetch(self, fetch: HostFetch) -> None:
        with self._condition:
            self._fetches.append(fetch)
            self._condition.notify_all()

    def cancel(self, transfer: HostFetch) -> None:
        """End a fetch: afterwards nothing is written to its blocks."""
        with self._condition:
            transfer.is_cancelled = True
            if transfer in self._fetches:
                self._fetches.remove(transfer)
                self._mover.end_fetch(transfer)
            while self._fetching is transfer:
                self._condition.wait()

    def wait_for_batch(self) -> None:
        """Wait until the running batch of stores, if any, is committed."""
        with self._condition:
            batch = self._num_batches
            self._condition.wait_for(lambda: not self._is_storing or self._num_batches > batch)

    def wait_for_stores(self) -> None:
        """Wait until all stores are done, for at most `_LAST_STORES_S`."""
        with self._condition:
            self._condition.wait_for(lambda: not (self._stores or self._is_storing) or self.is_broken, _LAST_STORES_S)

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: not (self._stores or self._is_storing or self._fetches or self._fetching), timeout_s
            )

    def reset(self) -> None:
        """Drop all queued stores and fetches, cancel a running fetch, and wait for the running copy."""
        with self._condition:
            self._stores.clear()
            for fetch in self._fetches:
                fetch.is_cancelled = True
                self._mover.end_fetch(fetch)
            self._fetches.clear()
            if self._fetching is not None:
                self._fetching.is_cancelled = True
            self._condition.wait_for(lambda: not self._copying and self._fetching is None)

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_LAST_COPY_S)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._fetches or self._stores)
                if self._closing:
                    return
                batch: list[BlockStore] = []
                if self._fetches:
                    self._fetching = self._fetches.popleft()
                else:
                    blocks = [block for block, _ in zip(self._stores, range(self._mover.store_batch), strict=False)]
                    batch = [self._stores.pop(block) for block in blocks]
                    self._copying = frozenset(blocks)
                    self._is_storing = True
                    self._num_batches += 1
            try:
                if self._fetching is not None:
                    self._mover.fetch(self._fetching)
                else:
                    self._mover.store(batch, self._release_blocks)
            except Exception:  # keep the thread alive, because callers wait for it; the engine's steps fail, too
                log.exception("the copies between device and host tier failed; the engine continues without tiers")
                self.is_broken = True
            finally:
                self._end_copy()

    def _release_blocks(self) -> None:
        """Allow the device's blocks to be overwritten: the rest of a store needs only host memory."""
        with self._condition:
            self._copying = frozenset()
            self._condition.notify_all()

    def _end_copy(self) -> None:
        with self._condition:
            if self._fetching is not None:
                self._mover.end_fetch(self._fetching)
                self._fetching = None
            self._copying = frozenset()
            self._is_storing = False
            self._condition.notify_all()
