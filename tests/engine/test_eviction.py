"""The order of eviction, compared with a plain model, and tested with a scan that defeats plain LRU."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.recency import GHOSTS_PER_BLOCK, PROTECTED_SHARE, EvictionOrder


class PlainSegments:
    """Segmented LRU in its simplest form: two lists, oldest first, and a list of ghosts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.ghosts: list[bytes] = []

    def add(self, block: int, is_reused: bool) -> None:
        if not is_reused:
            self.probation = [*self.probation, block]
            return
        self.protected = [*self.protected, block]
        if len(self.protected) > int(self.size * PROTECTED_SHARE):
            self.probation, self.protected = [*self.probation, self.protected[0]], self.protected[1:]

    def remove(self, block: int) -> None:
        self.probation = [b for b in self.probation if b != block]
        self.protected = [b for b in self.protected if b != block]

    def pop(self) -> int:
        first = (self.probation + self.protected)[0]
        self.remove(first)
        return first

    def remember(self, block_hash: bytes) -> None:
        self.ghosts = [*(g for g in self.ghosts if g != block_hash), block_hash][-self.size * GHOSTS_PER_BLOCK :]

    def recall(self, block_hash: bytes) -> bool:
        known = block_hash in self.ghosts
        self.ghosts = [g for g in self.ghosts if g != block_hash]
        return known


def test_a_cache_that_grows_or_shrinks_protects_its_share_of_what_it_is_then() -> None:
    order = EvictionOrder(1)
    for size in (20, 5):
        order.resize(size)
        for block in range(size):
            if block in order:
                order.remove(block)
            order.add(block, 1, protected=True)
        for scanned in range(100, 100 + size):
            order.add(scanned, 1)
        num_protected = int(size * PROTECTED_SHARE)
        went = [order.pop() for _ in range(len(order) - num_protected)]
        assert [*order] == [*range(size - num_protected, size)], went
        for block in range(100):
            if block in order:
                order.remove(block)


actions = st.lists(
    st.tuples(st.sampled_from(["add", "add reused", "remove", "pop", "recall"]), st.integers(0, 7)), max_size=80
)


@given(st.integers(1, 3), actions)
@settings(deadline=None)
def test_blocks_go_in_the_order_of_the_plain_model(size: int, actions: list[tuple[str, int]]) -> None:
    order, plain = EvictionOrder(size), PlainSegments(size)
    for action, n in actions:
        if action.startswith("add") and n not in order:
            order.add(n, 1, protected=action == "add reused")
            plain.add(n, action == "add reused")
        elif action == "remove" and n in order:
            order.remove(n)
            plain.remove(n)
        elif action == "pop" and len(order):
            block = order.pop()
            assert block == plain.pop()
            order.remember(bytes([block]))
            plain.remember(bytes([block]))
        elif action == "recall":
            assert order.recall(bytes([n])) == plain.recall(bytes([n]))
        assert list(order) == plain.probation + plain.protected


class Cache:
    """A pool that gets requests of one block each, one after another."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    def ask(self, block_hash: bytes) -> bool:
        if self.pool.has(block_hash):
            found = [self.pool.find(block_hash, -1)]
            self.pool.hold(found)
            self.pool.release(found)
            return True
        block = self.pool.allocate()
        assert block is not None
        self.pool.register(block, block_hash)
        self.pool.release([block])
        return False


class PlainLru:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.hashes: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, block_hash: bytes) -> bool:
        hit = block_hash in self.hashes
        self.hashes[block_hash] = None
        self.hashes.move_to_end(block_hash)
        if len(self.hashes) > self.num_blocks:
            self.hashes.popitem(last=False)
        return hit


HOT = [b"hot %d" % i for i in range(40)]


def hot_hits_beside_a_scan(cache: Cache | PlainLru, between: int) -> float:
    """Return the share of hits among requests for a hot set of 40 hashes, after two rounds.

    Between rounds, `between` other hashes are requested once each.
    """
    hits = asked = 0
    scanned = iter(range(10_000))
    for turn in range(30):
        for block_hash in HOT:
            hit = cache.ask(block_hash)
            if turn >= 2:
                hits, asked = hits + hit, asked + 1
        for _ in range(between):
            cache.ask(b"scan %d" % next(scanned))
    return hits / asked


def test_a_scan_of_thousands_of_blocks_leaves_the_hot_set_cached() -> None:
    assert hot_hits_beside_a_scan(PlainLru(100), between=200) == 0.0, "the scan must be one that plain LRU fails"
    assert hot_hits_beside_a_scan(Cache(100), between=200) == 1.0


def test_without_a_scan_nothing_is_lost_against_lru() -> None:
    assert hot_hits_beside_a_scan(Cache(100), between=0) == 1.0
