"""Fake tiers in memory for a FakeRunner: copies arrive late, in part or not at all, as a seed decides."""

from collections import Counter
from collections.abc import Hashable, Sequence
from random import Random

from pilotlight.engine.api.protocol import BlockSource
from pilotlight.engine.kv.tier_protocol import Tier, TierLoad, Tiers, Transfer
from tests.engine.fake_runner import FakeRunner

Content = list[tuple[int, ...] | None]


class FakeTransfer:
    def __init__(self, tiers: "FakeTiers", hashes: Sequence[bytes], blocks: Sequence[int] | None, polls: int) -> None:
        self.tiers = tiers
        self.hashes = list(hashes)
        self.blocks = blocks
        self.polls = polls
        self.num_blocks = 0
        self.bytes_per_s = 0.0
        self.is_ended = False

    @property
    def is_done(self) -> bool:
        """Tell whether the transfer has ended; each call advances it."""
        if self.polls > 0:
            self.polls -= 1
            self.tiers.advance(self)
        return self.polls == 0


class FakeLookup(FakeTransfer):
    """A lookup of block names in the store."""


class FakeTiers(Tiers):
    def __init__(
        self, runner: FakeRunner, seed: int, capacity: int = 30, has_disk: bool = True, has_store: bool = False
    ) -> None:
        self.runner = runner
        self.draw = Random(seed)
        self.capacity = capacity
        self.has_disk = has_disk
        self.has_store = has_store
        self.host: dict[bytes, Content] = {}
        self.disk: dict[bytes, Content] = {}
        self.store_of_all: dict[bytes, Content] = {}
        self.in_store: set[bytes] = set()  # names that lookups have found
        self.waiting: dict[int, bytes] = {}
        self.pins: dict[Hashable, list[bytes]] = {}
        self.open: set[FakeTransfer] = set()
        self.peers: dict[bytes, Content] = {}  # content that other hosts have computed
        self.handed_over: set[str] = set()
        self.num_lost = 0

    # The functions below are called by the scheduler.

    def store(self, block: int, block_hash: bytes) -> None:
        assert None not in self._content(block), "a block was stored before it was complete"
        self.waiting[block] = block_hash

    def drop(self, block: int) -> None:
        self.waiting.pop(block, None)

    def forget(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self.host.pop(block_hash, None)
            self.disk.pop(block_hash, None)
            self.store_of_all.pop(block_hash, None)

    def place_of(self, name: bytes) -> Tier | None:
        if name in self.host:
            return "host"
        return "disk" if name in self.disk else "store" if name in self.in_store else None

    def look_up(self, names: Sequence[bytes]) -> Transfer | None:
        """Start a lookup; when it ends, some steps later, `place_of` knows which blocks the store has."""
        if self.draw.random() < 0.2:
            return None
        return self._begin(FakeLookup(self, names, None, self.draw.randint(1, 4)))

    def pays(self, names: Sequence[bytes], num_tokens: int) -> bool:
        assert names
        assert num_tokens > 0
        return self.draw.random() >= 0.1

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        return self._begin(FakeTransfer(self, hashes, None, self.draw.randint(1, 4)))

    def ask(self, source: BlockSource, names: Sequence[bytes]) -> FakeTransfer | None:
        """Start a fetch from another host, which has the blocks in `peers`."""
        return self._begin(FakeTransfer(self, names, None, self.draw.randint(1, 4)))

    def begin_hand_over(self, hand_over: str) -> None:
        self.handed_over.add(hand_over)

    def end_hand_over(self, hand_over: str) -> None:
        self.handed_over.discard(hand_over)

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        assert len(hashes) == len(blocks)
        return self._begin(FakeTransfer(self, hashes, list(blocks), self.draw.randint(1, 4)))

    def cancel(self, transfer: Transfer) -> None:
        assert isinstance(transfer, FakeTransfer)
        self.open.discard(transfer)
        transfer.is_ended = True

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        assert isinstance(transfer, FakeTransfer)
        assert transfer.is_ended
        arrived = transfer.hashes[: transfer.num_blocks]
        self.pins.setdefault(owner, []).extend(arrived)
        return len(arrived)

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int], num_tokens: int) -> bool:
        if self.draw.random() < 0.3 or not hashes:
            return False
        for block_hash, block in zip(hashes, blocks, strict=True):
            self._keep(block_hash, block)
        self.pins.setdefault(owner, []).extend(hashes)
        return True

    def unpin(self, owner: Hashable) -> None:
        self.pins.pop(owner, None)

    # The functions below are called by the engine.

    def begin_stores(self, everything: bool) -> None:
        for block in list(self.waiting):
            if everything or self.draw.random() < 0.7:
                self._keep(self.waiting.pop(block), block)
        self._evict()

    def load(self) -> TierLoad:
        return TierLoad(self.num_lost)

    def reset(self) -> None:
        self.waiting.clear()
        self.pins.clear()
        self.open.clear()

    def close(self) -> None:
        self.reset()

    # Called by a transfer.

    def advance(self, transfer: FakeTransfer) -> None:
        """Let some blocks arrive; the last call ends the transfer."""
        if transfer.is_ended:
            return
        last = transfer.polls == 0
        if isinstance(transfer, FakeLookup):
            if last:
                self.in_store.update(self.store_of_all.keys() & set(transfer.hashes))
                self._end(transfer)
            return
        if last and self.draw.random() < 0.15:
            self.num_lost += 1  # the remaining blocks count as damaged
        else:
            end = len(transfer.hashes) if last else self.draw.randint(transfer.num_blocks, len(transfer.hashes))
            while transfer.num_blocks < end and self._bring(transfer, transfer.num_blocks):
                transfer.num_blocks += 1
        if last:
            self._end(transfer)

    def _end(self, transfer: FakeTransfer) -> None:
        self.open.discard(transfer)
        transfer.is_ended = True

    def _bring(self, transfer: FakeTransfer, i: int) -> bool:
        block_hash = transfer.hashes[i]
        content = self.host.get(block_hash)
        if transfer.blocks is None:
            found = self.disk.get(block_hash) or self.store_of_all.get(block_hash)
            content = content or found or self.peers.get(block_hash)
            if content is not None:
                self.host[block_hash] = content
        elif content is not None:
            start = transfer.blocks[i] * self.runner.block_size
            self.runner.slots[start : start + self.runner.block_size] = content
            if self.runner.memory is not None:
                self.runner.memory.write(transfer.blocks[i])
        return content is not None

    def _begin(self, transfer: FakeTransfer) -> FakeTransfer:
        self.open.add(transfer)
        return transfer

    def _content(self, block: int) -> Content:
        return self.runner.slots[block * self.runner.block_size : (block + 1) * self.runner.block_size]

    def _keep(self, block_hash: bytes, block: int) -> None:
        content = self._content(block)
        assert None not in content
        if self.runner.memory is not None:
            self.runner.memory.check(block)
        assert self.host.get(block_hash, content) == content, "two contents have the same name"
        self.host[block_hash] = content
        if self.has_disk and self.draw.random() < 0.5:
            self.disk[block_hash] = content
        elif self.has_store and self.draw.random() < 0.7:
            self.store_of_all[block_hash] = content

    def _evict(self) -> None:
        pinned = Counter(h for hashes in self.pins.values() for h in hashes)
        for block_hash in list(self.host):
            if len(self.host) <= self.capacity:
                break
            if block_hash not in pinned:
                del self.host[block_hash]
