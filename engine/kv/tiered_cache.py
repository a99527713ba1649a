"""One model's way to the tiers of its host: what to copy, what to bring back, and whether it pays.

The engine's thread asks and never waits, but for the end of the one small copy that is under way when a block of it is
to be overwritten. A thread of the model's own moves the bytes; fetches go before stores. Nothing is held for a store:
a block that is reused before its turn comes is simply not kept, so stores can neither leak blocks nor exhaust them.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from zlib import crc32

from engine.kv.block_copier import BlockCopier
from engine.kv.disk_thread import DiskRead, DiskThread
from engine.kv.host_tier import HostSlot, HostTier
from engine.kv.tiers import TierHit, Transfer
from engine.rates import TransferRate

log = logging.getLogger(__name__)

_STORED_PER_STEP_BYTES = 32 << 20
_BATCH_BYTES = 4 << 20  # under way at once: what an overwriting, an abort or a fetch may have to wait for
_LAST_STORES_S = 2.0  # 20 GiB of blocks from a device, 4 on a CPU; the other models of the host wait meanwhile
_LAST_COPY_S = 10.0


class HostFetch:
    """A run of a chain on its way from the host tier to the device."""

    def __init__(self, slots: list[HostSlot], blocks: Sequence[int], mark: object, started: float) -> None:
        self.slots = slots  # pinned until it is done
        self.blocks = list(blocks)
        self.mark = mark
        self.started = started
        self.num_blocks = 0
        self.is_done = False
        self.is_cancelled = False


class TieredCache:
    def __init__(
        self,
        host: HostTier,
        disk: DiskThread | None,
        copier: BlockCopier,
        block_bytes: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises TierError where a block does not fit the host tier."""
        host.add_size(block_bytes)
        self.store_rate = TransferRate()
        self.fetch_rate = TransferRate()
        self.num_lost = 0
        self._host = host
        self._disk = disk
        self._copier = copier
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._clock = clock
        self._batch = max(1, _BATCH_BYTES // block_bytes)
        self._prefill_tokens_per_s = 0.0
        self._pins: dict[Hashable, list[HostSlot]] = {}
        self._fresh: dict[int, bytes] = {}  # complete, but the step's results have not been handed out
        self._condition = threading.Condition()
        self._stores: dict[int, tuple[bytes, object]] = {}  # block -> its name and when it is complete
        self._copying: frozenset[int] = frozenset()  # blocks that are being read now
        self._is_storing = False
        self._num_batches = 0
        self._reads: set[DiskRead] = set()  # begun, and neither taken nor cancelled
        self._fetches: deque[HostFetch] = deque()
        self._fetching: HostFetch | None = None
        self._is_broken = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()

    @property
    def num_pinned(self) -> int:
        return sum(map(len, self._pins.values()))

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = tokens_per_s

    # Stores

    def store(self, block: int, block_hash: bytes) -> None:
        if block_hash not in self._host and not self._is_broken:
            self._fresh[block] = block_hash

    def begin_stores(self, everything: bool) -> None:
        if not self._fresh:
            return
        limit = len(self._fresh) if everything else max(1, _STORED_PER_STEP_BYTES // self._block_bytes)
        mark = self._copier.mark()
        begun = list(self._fresh)[:limit]
        with self._condition:
            for block in begun:
                self._stores[block] = (self._fresh.pop(block), mark)
            self._condition.notify_all()

    def drop(self, block: int) -> None:
        self._fresh.pop(block, None)
        with self._condition:
            self._stores.pop(block, None)
            while block in self._copying:
                self._condition.wait()

    def forget(self, hashes: Sequence[bytes]) -> None:
        self._await_batch()  # one of them may be about to be committed
        self._host.forget(hashes)
        if self._disk is not None:
            self._disk.forget(hashes)

    def touch(self, hashes: Sequence[bytes]) -> None:
        self._host.touch(hashes)

    def settle(self, hashes: Sequence[bytes]) -> None:
        self._host.refresh(hashes)

    # Fetches

    def lookup(self, hashes: Sequence[bytes], with_disk: bool) -> TierHit:
        if self._is_broken:
            return TierHit()
        with_disk = with_disk and self._disk is not None and not self._disk.is_stuck
        num_host = num_blocks = num_on_disk = 0
        for block_hash in hashes:
            if block_hash not in self._host:
                if self._disk is None or not with_disk or block_hash not in self._disk.disk:
                    break
                num_on_disk += 1
            num_blocks += 1
            num_host += num_on_disk == 0
        if num_on_disk:
            predicted_s = self._disk_s(num_on_disk) + self._fetch_s(num_blocks)
            assert self._disk is not None
            if self._disk.rate.is_worth_it(predicted_s, self._recompute_s(num_blocks)):
                return TierHit(num_blocks, num_on_disk)
        if num_host and self.fetch_rate.is_worth_it(self._fetch_s(num_host), self._recompute_s(num_host)):
            return TierHit(num_host)
        return TierHit()

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        assert self._disk is not None, "nothing was found on a disk"
        read = self._disk.read(hashes, self._block_bytes)
        self._reads.add(read)
        return read

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        assert isinstance(transfer, DiskRead)
        assert self._disk is not None
        self._reads.discard(transfer)
        slots = self._disk.take(transfer)
        self._pin(owner, slots)
        if len(slots) < len(transfer.hashes):
            self.num_lost += 1
        return transfer.num_read if slots else 0

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        fetch = HostFetch(self._host.pin_prefix(hashes), blocks, self._copier.mark(), self._clock())
        with self._condition:
            self._fetches.append(fetch)
            self._condition.notify_all()
        return fetch

    def cancel(self, transfer: Transfer) -> None:
        if isinstance(transfer, DiskRead):
            assert self._disk is not None
            self._reads.discard(transfer)
            self._disk.cancel(transfer)
            return
        assert isinstance(transfer, HostFetch)
        with self._condition:
            transfer.is_cancelled = True
            if transfer in self._fetches:
                self._fetches.remove(transfer)
                self._host.unpin(transfer.slots)
                transfer.is_done = True
            while self._fetching is transfer:
                self._condition.wait()

    # Swap

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int]) -> bool:
        missing = [(block, name) for block, name in zip(blocks, hashes, strict=True) if name not in self._host]
        num_blocks = len(hashes)
        swap_s = self.store_rate.predict_s(len(missing) * self._block_bytes) + self._fetch_s(num_blocks)
        if not num_blocks or self._is_broken or not self.store_rate.is_worth_it(swap_s, self._recompute_s(num_blocks)):
            return False
        mark = self._copier.mark()
        for start in range(0, len(missing), self._batch):
            batch = missing[start : start + self._batch]
            for block, _ in batch:
                self.drop(block)  # from the queue, where it may be waiting
            self._store([(block, name, mark) for block, name in batch])
        self._await_batch()
        slots = self._host.pin_prefix(hashes)
        self._pin(owner, slots)
        return bool(slots)

    def unpin(self, owner: Hashable) -> None:
        slots = self._pins.pop(owner, None)
        if slots:
            self._host.unpin(slots)

    # Ends

    def reset(self) -> None:
        self._fresh.clear()
        with self._condition:
            self._stores.clear()
            for fetch in self._fetches:
                self._host.unpin(fetch.slots)
                fetch.is_done = fetch.is_cancelled = True
            self._fetches.clear()
            if self._fetching is not None:
                self._fetching.is_cancelled = True
            self._condition.wait_for(lambda: not self._copying and self._fetching is None)
        for read in list(self._reads):
            self.cancel(read)
        for owner in list(self._pins):
            self.unpin(owner)

    def close(self) -> None:
        """What is complete is kept first: a model that goes to sleep finds its conversations again. It is little, since stores begin whenever
        there is nothing else to do."""
        if not self._is_broken:
            self.begin_stores(everything=True)
            with self._condition:
                self._condition.wait_for(
                    lambda: not (self._stores or self._is_storing) or self._is_broken, _LAST_STORES_S
                )
        self.reset()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_LAST_COPY_S)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """For those who want to look at what was stored."""
        with self._condition:
            idle = self._condition.wait_for(
                lambda: not (self._stores or self._is_storing or self._fetches or self._fetching), timeout_s
            )
        return idle and (self._disk is None or self._disk.wait_until_idle(timeout_s))

    def _pin(self, owner: Hashable, slots: list[HostSlot]) -> None:
        if slots:
            self._pins.setdefault(owner, []).extend(slots)

    def _await_batch(self) -> None:
        """Until the stores that are under way now, if any, are committed."""
        with self._condition:
            batch = self._num_batches
            self._condition.wait_for(lambda: not self._is_storing or self._num_batches > batch)

    def _recompute_s(self, num_blocks: int) -> float:
        if not self._prefill_tokens_per_s:
            return math.inf
        return num_blocks * self._block_size / self._prefill_tokens_per_s

    def _fetch_s(self, num_blocks: int) -> float:
        return self.fetch_rate.predict_s(num_blocks * self._block_bytes)

    def _disk_s(self, num_blocks: int) -> float:
        return self._disk.rate.predict_s(num_blocks * self._block_bytes) if self._disk is not None else math.inf

    # The mover's thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._fetches or self._stores)
                if self._closing:
                    return
                batch: list[tuple[int, bytes, object]] = []
                if self._fetches:
                    self._fetching = self._fetches.popleft()
                else:
                    blocks = [block for block, _ in zip(self._stores, range(self._batch), strict=False)]
                    batch = [(block, *self._stores.pop(block)) for block in blocks]
                    self._copying = frozenset(blocks)
                    self._is_storing = True
                    self._num_batches += 1
            try:
                if self._fetching is not None:
                    self._move(self._fetching)
                else:
                    self._store(batch, is_queued=True)
            except (
                Exception
            ):  # a device that fails ends the steps as well; a thread that ended would leave its callers waiting
                log.exception("the copies between device and host tier failed; the engine goes on without tiers")
                self._is_broken = True
            finally:
                self._rest()

    def _rest(self) -> None:
        with self._condition:
            if self._fetching is not None:
                self._host.unpin(self._fetching.slots)
                self._fetching.is_done = True
                self._fetching = None
            self._copying = frozenset()
            self._is_storing = False
            self._condition.notify_all()

    def _move(self, fetch: HostFetch) -> None:
        for start in range(0, len(fetch.slots), self._batch):
            if fetch.is_cancelled:
                return
            slots = fetch.slots[start : start + self._batch]
            sound = _leading(self._host.is_sound(slot) for slot in slots)
            views = [slot.memory for slot in slots[:sound]]
            self._copier.fetch(fetch.blocks[start : start + sound], views, fetch.mark)
            fetch.num_blocks += sound
            if sound < len(slots):
                self.num_lost += 1
                break
        self.fetch_rate.add(fetch.num_blocks * self._block_bytes, self._clock() - fetch.started)

    def _store(self, batch: list[tuple[int, bytes, object]], is_queued: bool = False) -> None:
        """From the mover's thread, or from the engine's for a swap that cannot wait."""
        started = self._clock()
        reserved = [(block, self._host.reserve(name, self._block_bytes), mark) for block, name, mark in batch]
        wanted = [(block, slot, mark) for block, slot, mark in reserved if slot is not None]
        copied = False
        try:
            if wanted:
                blocks, slots, marks = zip(*wanted, strict=True)
                self._copier.store(blocks, [slot.memory for slot in slots], marks[-1])  # the last is the latest
            copied = True
        finally:
            if not copied:
                for _, slot, _ in wanted:
                    self._host.abandon(slot)
        if is_queued:
            with self._condition:  # the device's blocks are free to change; what follows is between host and host
                self._copying = frozenset()
                self._condition.notify_all()
        for _, slot, _ in wanted:
            self._host.commit(slot, crc32(slot.memory))
            if self._disk is not None:
                self._disk.offer(slot.block_hash)
            self._host.unpin([slot])
        if wanted:
            self.store_rate.add(len(wanted) * self._block_bytes, self._clock() - started)


def _leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, flags))
