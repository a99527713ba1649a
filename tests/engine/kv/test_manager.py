"""The blocks of a sequence in a real pool: those that it needs, those that other sequences find, and fetches that arrive in part."""

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import pytest

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.kv.manager import BlockManager
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix, PrefixLookup
from pilotlight.engine.kv.pool.groups import CacheGroups, Windows
from pilotlight.engine.kv.pool.prefix_index import block_name, extend_chain
from pilotlight.engine.kv.tier_protocol import Tier, Tiers

SIZE = 4
BOTH: Windows = (None, 5)  # in the second group a token sees its own block and the previous one


class JournalEvents(Tiers):
    """Tiers that record calls, and have the blocks named in `host`."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, bytes]] = []
        self.forgotten: list[bytes] = []
        self.swapped: tuple[list[bytes], list[int], int] | None = None
        self.host: set[bytes] = set()

    def store(self, block: int, block_hash: bytes) -> None:
        self.stored.append((block, block_hash))

    def forget(self, hashes: SequenceOf[bytes]) -> None:
        self.forgotten += hashes

    def place_of(self, name: bytes) -> Tier | None:
        return "host" if name in self.host else None

    def pays(self, names: SequenceOf[bytes], num_tokens: int) -> bool:
        return True

    def swap_out(self, owner: Hashable, hashes: SequenceOf[bytes], blocks: SequenceOf[int], num_tokens: int) -> bool:
        self.swapped = list(hashes), list(blocks), num_tokens
        return True


class Made:
    def __init__(self, windows: Windows = BOTH, num_blocks: int = 40) -> None:
        self.pool, self.tiers, self.groups = BlockPool(num_blocks), JournalEvents(), CacheGroups(SIZE, 8, windows)
        self.manager = BlockManager(self.pool, self.tiers, self.groups)
        self.lookup = PrefixLookup(self.pool, self.tiers, self.groups, shares_prefixes=True)

    def sequence(self, num_tokens: int, name: str = "s", **sampling: bool) -> Sequence:
        return Sequence(name, list(range(num_tokens)), SamplingParams(9, **sampling), b"root")

    def names(self, num_blocks: int, group: int = 0) -> list[bytes]:
        hashes: list[bytes] = []
        extend_chain(hashes, b"root", range(num_blocks * SIZE), SIZE)
        return [block_name(one, group) for one in hashes]

    def computed(self, sequence: Sequence, *ends: int) -> Sequence:
        """Compute the sequence in steps that end at these positions."""
        self.manager.take(sequence, self.lookup.find_cached(sequence))
        for end in ends:
            assert self.manager.grow(sequence, end)
            sequence.num_computed_tokens = sequence.num_completed_tokens = end
            self.manager.complete(sequence, end)
        return sequence

    def found(self, num_blocks: int) -> list[list[bool]]:
        """Return for each group which of the first `num_blocks` blocks are cached."""
        return [
            [self.pool.has(name) for name in self.names(num_blocks, group)] for group in range(len(self.groups.windows))
        ]


def test_what_is_full_is_found_and_stored_once_and_what_a_window_has_left_is_given_back() -> None:
    made = Made()
    sequence = made.computed(made.sequence(30), 7)
    assert made.found(7) == [[True] + [False] * 6] * 2
    full, window = sequence.tables
    assert made.tiers.stored == [(full.blocks[0], made.names(1)[0]), (window.blocks[0], made.names(1, 1)[0])]
    for end, held in ((8, (2, 2)), (9, (3, 2)), (16, (4, 2)), (17, (5, 2))):
        assert made.manager.grow(sequence, end)
        made.manager.complete(sequence, end)
        assert (full.num_held, window.num_held) == held
        assert made.pool.num_held == sum(held)
    assert made.found(7) == [[True] * 4 + [False] * 3] * 2, "released blocks stay in the cache"
    assert len(made.tiers.stored) == 8
    twin = made.computed(made.sequence(30, "twin"))
    assert list(twin.tables[0].held) == list(full.blocks)[:4]
    assert made.manager.grow(twin, 20)
    made.manager.complete(twin, 20)
    made.manager.complete(sequence, 20)
    assert len(made.tiers.stored) == 10, "only one copy of equal blocks is kept"


def test_a_block_is_named_when_all_its_tokens_are_known() -> None:
    made = Made((None,))
    sequence = made.computed(made.sequence(7), 7)
    sequence.token_ids += [7, PENDING]
    assert made.manager.grow(sequence, 9)
    made.manager.complete(sequence, 7)
    assert len(sequence.block_hashes) == 1
    sequence.token_ids += [PENDING] * 3  # the next step is launched before results are known
    made.manager.complete(sequence, 8)
    assert sequence.block_hashes == made.names(2)
    sequence.token_ids[8:] = [8, 9, 10, 11]
    assert made.manager.grow(sequence, 12)
    made.manager.complete(sequence, 12)
    assert sequence.block_hashes == made.names(3)
    assert made.found(3) == [[True] * 3]


def test_what_a_sequence_needs_is_what_its_tables_lack() -> None:
    made = Made()
    sequence = made.sequence(
        30
    )  # full attention needs 8 blocks; the window 4: one before a chunk, two for the chunk, one more
    assert made.manager.num_needed(sequence, made.lookup.find_cached(sequence)) == 8 + 4
    made.computed(sequence, 8, 16)
    assert sequence.num_blocks == 4 + 2
    assert made.manager.num_missing(sequence) == 12 - 6
    assert [made.manager.num_lacking(sequence, end) for end in (16, 17, 21, 0)] == [0, 2, 4, 0]
    other = made.sequence(30, "other")
    prefix = made.lookup.find_cached(other)
    assert (prefix.num_blocks, len(prefix.cached)) == (4, 5)
    assert made.manager.num_needed(other, prefix) == 12 - 5
    short = made.sequence(2)
    assert made.manager.num_needed(short, made.lookup.find_cached(short)) == 2
    made.computed(short, 2)
    assert (made.manager.num_missing(short), made.manager.num_spare(short)) == (0, 2), (
        "one block for each table, to continue"
    )
    assert made.manager.num_spare(sequence) == 6


def test_an_empty_pool_keeps_the_allocated_blocks() -> None:
    made = Made((None,), num_blocks=3)
    sequence = made.computed(made.sequence(20), 4)
    assert not made.manager.grow(sequence, 20)
    assert (sequence.num_blocks, made.pool.num_available) == (3, 0)
    assert made.manager.grow(sequence, 12)


def fetched(
    windows: Windows, num_arrived: int, on_device: int = 0, *, is_spoilt: bool = False
) -> tuple[Made, Sequence, CachedPrefix]:
    """Fetch a prompt of six blocks: `on_device` are on the device, the rest in a tier, of which `num_arrived` arrive."""
    made = Made(windows)
    if on_device:
        first = made.computed(made.sequence(on_device * SIZE, "first"), on_device * SIZE)
        made.manager.release(first, lambda: [])
    made.tiers.host = {name for group in range(len(windows)) for name in made.names(6, group)}
    sequence = made.sequence(6 * SIZE + 1)
    prefix = made.lookup.find_in_tiers(sequence, made.lookup.find_cached(sequence))
    fresh = made.manager.take(sequence, prefix)
    assert sequence.num_registered_blocks == 0
    assert [sequence.tables[group].blocks[place] for place, group in prefix.missing] == fresh
    if is_spoilt:
        made.pool.generations[fresh[1]] += 1  # as if the block had been handed out again
    made.manager.end_fetch(sequence, prefix, num_arrived)
    return made, sequence, prefix


@pytest.mark.parametrize("on_device", [0, 2])
@pytest.mark.parametrize("num_arrived", [0, 1, 3, 4])
def test_a_sequence_continues_after_the_received_tokens(num_arrived: int, on_device: int) -> None:
    made, sequence, prefix = fetched((None,), num_arrived, on_device)
    whole = on_device + num_arrived
    assert (prefix.num_blocks, len(prefix.missing)) == (6, 6 - on_device)
    assert sequence.num_registered_blocks == whole
    assert made.found(6) == [[True] * whole + [False] * (6 - whole)]
    assert len(sequence.tables[0]) == 6, "blocks that did not arrive are computed in their place"


@pytest.mark.parametrize(("num_arrived", "is_whole"), [(7, True), (6, False), (3, False), (0, False)])
def test_where_a_window_lacks_what_is_seen_the_sequence_begins_anew(num_arrived: int, is_whole: bool) -> None:
    made, sequence, prefix = fetched(BOTH, num_arrived)
    assert prefix.missing == ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (5, 1))
    assert [len(table) for table in sequence.tables] == ([6, 6] if is_whole else [0, 0])
    assert sequence.num_registered_blocks == (6 if is_whole else 0)
    assert made.pool.num_held == (7 if is_whole else 0)
    full, window = made.found(6)
    assert full == [True] * min(6, num_arrived) + [False] * (6 - min(6, num_arrived)), (
        "other sequences find the blocks that arrived"
    )
    assert window == [False] * 5 + [is_whole]


def test_blocks_of_which_one_may_be_anothers_are_kept_until_the_next_step_looks() -> None:
    made, sequence, _ = fetched(BOTH, 3, is_spoilt=True)
    assert [len(table) for table in sequence.tables] == [6, 6]
    assert (sequence.num_registered_blocks, made.pool.num_held) == (0, 7)


def test_what_is_seen_of_full_blocks_is_swapped_out_under_its_names() -> None:
    made = Made()
    sequence = made.computed(made.sequence(30), 8, 16, 18)
    assert made.manager.swap_out(sequence)
    assert made.tiers.swapped is not None
    names, blocks, num_tokens = made.tiers.swapped
    assert names == [*made.names(4)[:3], made.names(4)[3], made.names(4, 1)[3]]
    assert blocks == [*sequence.tables[0].blocks[:4], sequence.tables[1].blocks[3]]
    assert num_tokens == 16
    made.pool.generations[blocks[1]] += 1  # as if the block had been handed out again
    made.manager.swap_out(sequence)
    assert names[1] not in made.tiers.swapped[0]
    assert len(made.tiers.swapped[0]) == 4
    reporting = made.computed(made.sequence(9, "reporting", prompt_logprobs=True), 8)
    made.tiers.swapped = None
    assert not made.manager.swap_out(reporting)
    assert made.tiers.swapped is None


def test_of_twins_the_one_that_others_find_is_swapped_out() -> None:
    """Two sequences computed the same blocks, and only one copy is registered. Reusing the other one cancels no copy, so it must not be copied."""
    made = Made((None,))
    first, twin = made.sequence(12), made.sequence(12, "twin")
    made.manager.take(twin, made.lookup.find_cached(twin))
    assert made.manager.grow(twin, 12)  # before the blocks of `first` are registered
    made.computed(first, 12)
    made.manager.complete(twin, 12)
    assert set(twin.tables[0].blocks).isdisjoint(first.tables[0].blocks)
    assert made.manager.swap_out(twin)
    assert made.tiers.swapped is not None
    assert made.tiers.swapped[:2] == (made.names(3), [*first.tables[0].blocks[:3]])


def test_discarded_blocks_are_found_nowhere_and_the_own_ones_are_reported() -> None:
    made = Made()
    other = made.computed(made.sequence(9, "other"), 8)
    sequence = made.computed(made.sequence(30), 16, 24)
    shared = set(sequence.tables[0].blocks) & set(other.tables[0].blocks)
    assert len(shared) == 2
    told = made.manager.discard(sequence)
    held = [block for table in sequence.tables for block in table.held]
    assert set(told) >= set(held) - shared - set(other.tables[1].blocks)
    assert not shared & set(told)
    assert len(told) == len(set(told))
    assert made.found(6) == [[False] * 6] * 2
    assert set(made.tiers.forgotten) == {*made.names(7), *made.names(7, 1)}


def test_blocks_are_given_back_once_and_one_that_is_anothers_stays_with_it() -> None:
    made = Made((None,))
    sequence = made.computed(made.sequence(12), 12)
    thief = made.computed(made.sequence(3, "thief"), 3)
    doubtful = sequence.tables[0].blocks[2]
    made.pool.generations[doubtful] += 1
    thief.tables[0].append(doubtful, made.pool.generations[doubtful])
    epoch = sequence.epoch
    made.manager.release(sequence, lambda: [thief])
    assert (sequence.tables, sequence.epoch) == ([], epoch + 1)
    assert made.pool.num_holders(doubtful) == 1
    assert made.pool.num_held == 2
    made.manager.release(thief, lambda: [])
    assert made.pool.num_held == 0
    made.pool.assert_consistent()
