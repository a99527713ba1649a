"""One model's view of its host's tiers: decides which blocks to copy and fetch, and if that pays off.

The engine's thread makes requests and hardly ever waits. A thread per model copies between device and host tier (host_thread.py); other threads read
and write the disk and the store.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pilotlight.engine.api.protocol import BlockSource, CorruptBlocks
from pilotlight.engine.kv.store.store_thread import StoreLookup, StoreThread
from pilotlight.engine.kv.tier_protocol import Tier, TierLoad, Tiers, Transfer
from pilotlight.engine.kv.tiers.disk_thread import DiskThread
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead
from pilotlight.engine.kv.transfer.block_copier import BlockCopier
from pilotlight.engine.kv.transfer.block_mover import BlockMover, BlockStore, HostFetch, KeptSlots
from pilotlight.engine.kv.transfer.host_thread import HostThread

if TYPE_CHECKING:
    from pilotlight.engine.kv.peers.peer_link import PeerLink

ReadT = TypeVar("ReadT", bound=TierRead)

_STORED_PER_STEP_BYTES = 32 << 20


class TieredCache(Tiers):
    def __init__(
        self,
        host: HostTier,
        disk: DiskThread | None,
        copier: BlockCopier,
        block_bytes: int,
        peers: "PeerLink | None" = None,
        store: StoreThread | None = None,
        stored_per_step_bytes: int = _STORED_PER_STEP_BYTES,
    ) -> None:
        """Start the model's copying thread. `peers`: the link to hosts with which this model exchanges blocks.

        Raises TierError if a block does not fit the host tier.
        """
        self._behind: list[DiskThread | StoreThread] = [
            tier for tier in (disk, store) if tier is not None
        ]  # tiers beyond the host tier, nearest first
        self.mover = BlockMover(host, self._offer, copier, block_bytes)
        self._host = host
        self._disk = disk
        self._store = store
        self.has_store = store is not None
        self._peers = peers
        self._block_bytes = block_bytes
        self._stored_per_step = max(1, stored_per_step_bytes // block_bytes)  # blocks
        self._prefill_tokens_per_s = 0.0
        self._pins: dict[Hashable, KeptSlots] = {}
        self._awaited: dict[str, bool] = {}  # hand-overs -> whether the sequence still computes
        self._fresh: dict[int, bytes] = {}  # complete blocks that `begin_stores` has not queued for a copy yet
        self._reads: list[TierRead] = []  # reads; some may have ended
        self._num_lost_reads = 0
        self._thread = HostThread(self.mover)

    @property
    def num_heard(self) -> int:
        return self._peers.reader.num_heard if self._peers is not None else 0

    def load(self) -> TierLoad:
        peers, store = self._peers, self._store
        return TierLoad(
            self.mover.num_lost + self._num_lost_reads,
            self._host.num_pinned,
            peers.server.rate.bytes_per_s / self._block_bytes if peers is not None else 0.0,
            store.identity if store is not None and store.is_usable else "",
            store.rate.bytes_per_s / self._block_bytes if store is not None else 0.0,
            self._corrupt_blocks(),
        )

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = tokens_per_s

    # Stores

    def store(self, block: int, block_hash: bytes) -> None:
        if block_hash not in self._host and not self._thread.is_broken:
            self._fresh[block] = block_hash

    def begin_stores(self, everything: bool) -> None:
        everything = everything or bool(self._awaited)
        self._awaited = {name: is_open for name, is_open in self._awaited.items() if is_open}
        if not self._fresh:
            return
        limit = len(self._fresh) if everything else self._stored_per_step
        mark = self.mover.mark()
        started = list(self._fresh)[:limit]
        self._thread.store([BlockStore(block, self._fresh.pop(block), mark) for block in started])

    def drop(self, block: int) -> None:
        self._fresh.pop(block, None)
        self._thread.drop(block)

    def forget(self, hashes: Sequence[bytes]) -> None:
        self._thread.wait_for_batch()  # a running store may be about to commit one of these blocks
        for tier in self._behind:
            tier.forget(hashes)
        self._host.forget(hashes)  # the host tier last, because reads from other tiers may add these blocks until then

    def touch(self, hashes: Sequence[bytes]) -> None:
        self._host.touch(hashes)
        for tier in self._behind:
            tier.note_reuse(hashes)

    def end_chain(self, hashes: Sequence[bytes]) -> None:
        self._host.refresh(hashes)

    # Fetches

    def place_of(self, name: bytes) -> Tier | None:
        if self._thread.is_broken:
            return None
        if name in self._host:
            return "host"
        for tier in self._behind:
            if name in tier and tier.is_usable:
                return tier.kind
        return None

    def pays(self, names: Sequence[bytes], num_tokens: int) -> bool:
        places = Counter(map(self.place_of, names))
        rate, fetch_s = self.mover.fetch_rate, self._fetch_s(len(names))
        for tier in self._behind:
            if num_blocks := places[tier.kind]:
                rate = tier.rate
                fetch_s += rate.predict_s(num_blocks * self._block_bytes)
        return rate.is_worth_it(fetch_s, self._recompute_s(num_tokens))

    def look_up(self, names: Sequence[bytes]) -> Transfer | None:
        if self._store is None or self._thread.is_broken or not self._store.is_usable:
            return None
        return self._store.look_up(names)

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        places = set(map(self.place_of, hashes))
        found = [tier for tier in self._behind if tier.kind in places]
        # If no tier is usable any more, the read ends without blocks or times out, and the sequence computes them.
        source = found[-1] if found else self._behind[0]
        return self._begin(source.read(hashes, self._block_bytes))

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        assert isinstance(transfer, TierRead)
        slots = transfer.take()
        self._pin(owner, slots)
        if len(slots) < len(transfer.hashes):
            self._num_lost_reads += 1
        return transfer.num_read if slots else 0

    def ask(self, source: BlockSource, names: Sequence[bytes]) -> Transfer | None:
        if self._peers is None or self._thread.is_broken:
            return None
        return self._begin(self._peers.reader.read(source, self._peers.identity, names, self._block_bytes))

    def begin_hand_over(self, hand_over: str) -> None:
        self._awaited[hand_over] = True
        if self._peers is not None:
            self._peers.server.begin(hand_over)

    def end_hand_over(self, hand_over: str) -> None:
        self._awaited[hand_over] = False  # removed by the next `begin_stores`, which stores the sequence's last blocks
        if self._peers is not None:
            self._peers.server.end(hand_over)

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        fetch = self.mover.begin_fetch(hashes, blocks)
        self._thread.fetch(fetch)
        return fetch

    def cancel(self, transfer: Transfer) -> None:
        if isinstance(transfer, HostFetch):
            self._thread.cancel(transfer)
        else:
            assert isinstance(transfer, TierRead | StoreLookup)
            transfer.cancel()

    # Swap

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int], num_tokens: int) -> bool:
        missing = [(block, name) for block, name in zip(blocks, hashes, strict=True) if name not in self._host]
        num_blocks, rate = len(hashes), self.mover.store_rate
        swap_s = rate.predict_s(len(missing) * self._block_bytes) + self._fetch_s(num_blocks)
        if not num_blocks or self._thread.is_broken or not rate.is_worth_it(swap_s, self._recompute_s(num_tokens)):
            return False
        # These copies may be gigabytes, so the scheduler does not wait for them: a block that is reused before its copy is not stored. Blocks are
        # copied from the chain's head on, but reused from its tail on.
        self._pin(owner, self._host.pin_prefix(hashes))
        mark, kept = self.mover.mark(), self._pins.setdefault(owner, KeptSlots(self._host))
        for block, _ in missing:
            self._fresh.pop(block, None)
        self._thread.store([BlockStore(block, name, mark, kept) for block, name in missing], first=True)
        return True

    def unpin(self, owner: Hashable) -> None:
        kept = self._pins.pop(owner, None)
        if kept is not None:
            kept.unpin()

    # Reset and close

    def reset(self) -> None:
        self._fresh.clear()
        self._thread.reset()
        for read in self._reads:
            read.cancel()
        for owner in list(self._pins):
            self.unpin(owner)

    def close(self) -> None:
        """Store the remaining complete blocks, which a woken model then finds, and end.

        Few blocks remain, since stores start whenever the engine is idle.
        """
        if not self._thread.is_broken:
            self.begin_stores(everything=True)
            self._thread.wait_for_stores()
        self.reset()
        if self._peers is not None:
            self._peers.close()
        self._thread.close()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no copy is queued or running; return False after `timeout_s`. For tests."""
        idle = self._thread.wait_until_idle(timeout_s)
        return idle and all(tier.wait_until_idle(timeout_s) for tier in self._behind)

    def _begin(self, read: ReadT) -> ReadT:
        self._reads = [*(each for each in self._reads if not each.is_cancelled), read]
        return read

    def _offer(self, name: bytes) -> None:
        for tier in self._behind:
            tier.offer(name)

    def _pin(self, owner: Hashable, slots: list[HostSlot]) -> None:
        if slots:
            self._pins.setdefault(owner, KeptSlots(self._host)).add(slots)

    def _recompute_s(self, num_tokens: int) -> float:
        return num_tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else math.inf

    def _fetch_s(self, num_blocks: int) -> float:
        return self.mover.fetch_rate.predict_s(num_blocks * self._block_bytes)

    def _corrupt_blocks(self) -> CorruptBlocks:
        disk, store, peers = self._disk, self._store, self._peers
        return CorruptBlocks(
            host=self._host.num_corrupt,
            disk=disk.disk.num_corrupt if disk is not None else 0,
            store=store.num_corrupt if store is not None else 0,
            peer=peers.reader.num_corrupt if peers is not None else 0,
        )
