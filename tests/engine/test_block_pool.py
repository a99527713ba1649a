from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity, chain_root, extend_chain


def test_the_block_unused_for_longest_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        assert block is not None
        pool.register(block, bytes([block]))
        pool.release([block])
    first = [pool.find(bytes([blocks[0] or 0]), -1)]
    pool.hold(first)
    pool.release(first)  # used again, so it is now the most recent
    assert pool.allocate() == blocks[1]
    assert not pool.has(bytes([blocks[1] or 0]))
    pool.assert_consistent()


def test_a_tail_goes_before_the_head_it_hangs_on() -> None:
    pool = BlockPool(2)
    head, tail = pool.allocate(), pool.allocate()
    assert head is not None
    assert tail is not None
    pool.register(head, b"head")
    pool.register(tail, b"tail")
    pool.release([head, tail])
    assert pool.allocate() == tail
    assert (pool.find(b"head", -1), pool.has(b"tail")) == (head, False)


def test_held_blocks_are_never_handed_out_again() -> None:
    pool = BlockPool(2)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.allocate() is None


def test_a_twin_of_a_cached_block_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None
    assert second is not None
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same", -1) == first
    pool.release([second])
    assert pool.find(b"same", -1) == first
    pool.assert_consistent()


def test_forgotten_content_is_not_found_though_the_block_is_held() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.register(block, b"bad")
    pool.forget([block])
    assert not pool.has(b"bad")
    pool.release([block])
    assert pool.num_available == 1
    pool.assert_consistent()


def test_a_block_without_holders_after_all_is_free_and_its_content_is_not_found() -> None:
    pool = BlockPool(2)
    doubtful, shared = pool.allocate(), pool.allocate()
    assert doubtful is not None
    assert shared is not None
    pool.register(doubtful, b"doubtful")
    pool.register(shared, b"shared")
    pool.recount(doubtful, 0)
    pool.recount(shared, 2)
    assert not pool.has(b"doubtful")
    assert (pool.num_holders(shared), pool.num_available) == (2, 1)
    pool.recount(doubtful, 3)
    assert pool.num_holders(doubtful) == 0, "a free block has no holders"
    pool.assert_consistent()


def test_releasing_too_often_is_noticed() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block is not None
    pool.release([block])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


NAMES = [bytes([n]) for n in range(6)]
ACTIONS = [
    *("allocate", "release", "register", "share") * 2,
    "release all", "forget", "discard", "recount", "add", "remove",
]  # fmt: skip


class PlainPool:
    """The expected state of a pool of two shares, computed by a look at every block.

    The choice among evictable blocks is left to EvictionOrder.
    """

    def __init__(self, present: set[int], can_lend: list[int]) -> None:
        self.present = present
        self.can_lend = can_lend
        self.holds: Counter[int] = Counter()
        self.name_of: dict[int, bytes] = {}
        self.generations: Counter[int] = Counter()
        self.forgotten: list[int] = []

    def of(self, share: int) -> set[int]:
        return {block for block in self.present if block % 2 == share}

    def free(self, share: int) -> list[int]:
        return sorted(block for block in self.of(share) if not self.holds[block] and block not in self.name_of)

    def evictable(self, share: int) -> set[int]:
        return {block for block in self.of(share) if not self.holds[block] and block in self.name_of}

    def found(self, share: int) -> dict[bytes, int]:
        return {name: block for block, name in self.name_of.items() if block % 2 == share}

    def forget(self, block: int) -> None:
        if self.name_of.pop(block, None) is not None:
            self.forgotten.append(block)

    def assert_same(self, pool: BlockPool, forgotten: list[int]) -> None:
        pool.assert_consistent()
        assert forgotten == self.forgotten
        held = {block for block, holds in self.holds.items() if holds}
        assert (pool.num_blocks, pool.num_held) == (len(self.present), len(held))
        assert list(pool.generations) == [self.generations[block] for block in range(10)]
        assert [pool.num_holders(block) for block in range(10)] == [self.holds[block] for block in range(10)]
        for share in (0, 1):
            assert pool.num_available_in(share) == len(self.free(share)) + len(self.evictable(share))
            found = self.found(share)
            assert [pool.find(name, -1, share) for name in NAMES] == [found.get(name, -1) for name in NAMES]
            assert [pool.has(name, share) for name in NAMES] == [name in found for name in NAMES]
        for some in (range(3), range(3, 10)):
            assert pool.is_held(some) == bool(held & set(some))
            assert pool.num_cached(some) == len(self.name_of.keys() & set(some))
            assert pool.num_evictable(some) == len(set(some) - held)


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.sampled_from(NAMES)), max_size=40))
@settings(deadline=None)
def test_every_block_is_held_evictable_or_free_and_found_by_its_name(actions: list[tuple[str, int, bytes]]) -> None:
    def lend() -> bool:
        if plain.can_lend:
            plain.present.add(block := plain.can_lend.pop())
            pool.add_blocks([block])
            return True
        return False

    plain, forgotten = PlainPool(set(range(4)), [4, 5]), list[int]()
    pool = BlockPool(4, 10, lend, forgotten.append, num_shares=2)
    for action, n, name in actions:
        share, held = n % 2, sorted(plain.holds.elements())
        block = held[n % len(held)] if held else None
        if action == "allocate":
            taken = pool.allocate(share)  # borrows only if no block of the share is free
            if free := plain.free(share):
                assert taken == free[0], "the lowest free block is taken"
            elif taken is None:
                assert not plain.evictable(share)
            else:
                assert taken in plain.evictable(share)
                plain.forget(taken)
            if taken is not None:
                plain.holds[taken] += 1
                plain.generations[taken] += 1
        elif action == "share" and name in plain.found(share):
            pool.hold([one := plain.found(share)[name]])
            plain.holds[one] += 1
        elif action == "add" and n not in plain.present and n not in plain.can_lend:
            pool.add_blocks([n])
            plain.present.add(n)
        elif action == "remove" and not plain.holds[n]:
            pool.remove_blocks([n])
            if n in plain.present:
                plain.forget(n)
                plain.present.remove(n)
                plain.generations[n] += 1
        elif action == "discard":
            bad = [each for each in (plain.found(0).get(name), plain.found(1).get(name)) if each is not None]
            assert pool.discard([name]) == [each for each in bad if not plain.holds[each]]
            for each in bad:
                plain.forget(each)
        elif block is None:
            continue
        elif action == "release":
            pool.release([block])
            plain.holds[block] -= 1
        elif action == "release all":
            pool.release(sorted(set(held)))
            plain.holds.subtract(set(held))
        elif action == "register":
            is_first = name not in plain.found(block % 2) and block not in plain.name_of
            assert pool.register(block, name) == is_first
            if is_first:
                plain.name_of[block] = name
            assert pool.is_found(block, name) == (plain.name_of.get(block) == name)
        elif action == "forget":
            pool.forget([block])
            plain.forget(block)
        elif action == "recount":
            pool.recount(block, n % 3)
            plain.holds[block] = n % 3
            if not n % 3:
                plain.forget(block)
        plain.assert_same(pool, forgotten)


def test_a_held_block_cannot_be_removed_and_lent_ones_are_reclaimed_before_eviction() -> None:
    def lend() -> bool:
        if pool.num_blocks == 1 and may_lend:
            pool.add_blocks([1])
            return True
        return False

    may_lend = False
    pool = BlockPool(1, capacity=2, borrow=lend)
    block = pool.allocate()
    assert block is not None
    with pytest.raises(AssertionError, match="removed while it is held"):
        pool.remove_blocks([block])
    pool.register(block, b"cached")
    pool.release([block])

    may_lend = True
    assert pool.allocate() == 1
    assert pool.find(b"cached", -1) == block
    assert pool.allocate() == block, "with nothing left to borrow, a cached block is evicted"


def test_blocks_are_handed_out_from_below_in_whatever_order_they_come() -> None:
    pool = BlockPool(0, capacity=12)
    pool.add_blocks([9, 6, 7])
    pool.add_blocks([3, 1])
    assert [pool.allocate(), pool.allocate()] == [1, 3]
    pool.add_blocks([0])
    pool.release([3, 1])
    pool.remove_blocks([1, 6])
    assert [pool.allocate() for _ in range(5)] == [0, 3, 7, 9, None]


def test_what_was_found_again_outlasts_a_scan_in_blocks_that_were_lent() -> None:
    def cached(names: range) -> list[int]:
        blocks = []
        for number in names:
            block = pool.allocate()
            assert block is not None
            pool.register(block, bytes([number]))
            pool.release([block])
            blocks.append(block)
        return blocks

    pool = BlockPool(0, capacity=10)
    pool.add_blocks(range(10))
    hot = cached(range(4))
    pool.hold(hot)
    pool.release(hot)
    cached(range(10, 40))
    assert [pool.find(bytes([number]), -1) for number in range(4)] == hot
    pool.remove_blocks([block for block in range(10) if block not in hot])
    cached(range(40, 42))
    assert sum(pool.has(bytes([number])) for number in range(4)) == 3, "at most one of the four may be evicted"


def test_a_share_has_blocks_and_names_of_its_own() -> None:
    pool = BlockPool(6, num_shares=2)
    mine, theirs = [pool.allocate(1) for _ in range(3)], pool.allocate(0)
    assert (mine, theirs) == ([1, 3, 5], 0)
    assert pool.allocate(1) is None, "the free blocks belong to the other share"
    assert (pool.num_available_in(0), pool.num_available_in(1), pool.num_available) == (2, 0, 2)
    assert (pool.num_held_in(0), pool.num_held_in(1)) == (1, 3)
    assert pool.register(1, b"name")
    assert pool.register(0, b"name"), "each share has its own names"
    assert not pool.register(3, b"name")
    assert (pool.find(b"name", -1, 0), pool.find(b"name", -1, 1)) == (0, 1)
    assert (pool.is_found(1, b"name"), pool.is_found(3, b"name")) == (True, False)
    pool.release([1, 3])
    assert pool.allocate(1) == 3
    assert pool.allocate(1) == 1, "a cached block is evicted last"
    assert not pool.has(b"name", 1)
    assert pool.has(b"name", 0)
    pool.release([0])
    assert pool.discard([b"name"]) == [0]
    pool.assert_consistent()


def chain(root: bytes, tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root, tokens, block_size=4)
    return hashes


def test_a_hash_covers_every_token_before_its_end() -> None:
    root = chain_root(b"", CacheIdentity("m", "float32", 4))
    base = chain(root, list(range(12)))
    assert len(base) == 3
    changed = chain(root, [99, *range(1, 12)])
    assert not set(base) & set(changed)
    late = chain(root, [*range(11), 99])
    assert late[:2] == base[:2]
    assert late[2] != base[2]


def test_a_chain_grown_in_steps_is_the_chain_of_the_whole() -> None:
    root, tokens = chain_root(b"s", CacheIdentity("m", "float32", 4)), list(range(30))
    grown: list[bytes] = []
    for end in (3, 4, 5, 17, 30):
        extend_chain(grown, root, tokens[:end], block_size=4)
    assert grown == chain(root, tokens)


def test_whatever_the_bytes_depend_on_starts_a_chain_of_its_own() -> None:
    base = CacheIdentity("bc", "float32", 16, "layers", b"weights")
    roots = {
        chain_root(b"a", base),
        chain_root(b"ab", base._replace(model="c")),
        chain_root(b"", base._replace(model="abc")),
        chain_root(b"", base),
        *(chain_root(b"a", changed) for changed in (
            base._replace(dtype="bfloat16"),
            base._replace(block_size=1),
            base._replace(layout="layersw"),
            base._replace(layout="layersw", weights=b"eights"),
            base._replace(weights=b"weight5"),
        )),
    }  # fmt: skip
    assert len(roots) == 9


@pytest.mark.parametrize(
    ("start", "end", "blocks"),
    [(4, 8, {1}), (3, 5, {0, 1}), (7, 8, {1}), (8, 9, {2}), (0, 12, {0, 1, 2}), (5, 12, {1, 2})],
)
def test_every_block_in_which_an_image_lies_is_named_by_it_and_by_its_part_of_it(
    start: int, end: int, blocks: set[int]
) -> None:
    root, tokens = chain_root(b"", CacheIdentity("m", "float32", 4)), [7] * 12

    def own(number: int, *images: SequenceImage) -> bytes:
        """Return the hash of block `number` with these images, after blocks without images."""
        hashes = chain(root, tokens)[:number]
        extend_chain(hashes, root, tokens[: 4 * (number + 1)], 4, images)
        return hashes[-1]

    def image(name: bytes, start: int = start) -> SequenceImage:
        return SequenceImage(name, b"", start, end, array("q"), False)

    for number in range(3):
        names = {own(number), own(number, image(b"one")), own(number, image(b"two"))}
        assert len(names) == (3 if number in blocks else 1), number
    if start:
        assert own(max(blocks), image(b"one")) != own(max(blocks), image(b"one", start - 1)), (
            "another part of an image must give another hash"
        )
