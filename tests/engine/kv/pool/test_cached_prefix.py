"""The longest cached prefix, compared with a search over every length, for any combination of full attention and windows."""

from collections.abc import Sequence as SequenceOf
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix, PrefixLookup
from pilotlight.engine.kv.pool.groups import CacheGroups, Windows
from pilotlight.engine.kv.pool.prefix_index import block_name, extend_chain
from pilotlight.engine.kv.tier_protocol import Tier, Tiers

SIZE, LENGTH = 4, 26  # six full blocks that may be cached; the last token is always computed
PLACES = ("device", "host", "disk", "store", None)
WINDOWS = st.lists(st.sampled_from([None, 1, 3, 4, 5, 9, 30]), min_size=1, max_size=3).map(tuple)


class Places(Tiers):
    """Fake tiers: `place` has the tier of each block. Fetching is worth it only from the tiers in `worth`."""

    def __init__(self, place: dict[bytes, Tier], worth: frozenset[str]) -> None:
        self._place = place
        self._worth = worth
        self.asked: list[tuple[SequenceOf[bytes], int]] = []

    def place_of(self, name: bytes) -> Tier | None:
        return self._place.get(name)

    def pays(self, names: SequenceOf[bytes], num_tokens: int) -> bool:
        self.asked.append((names, num_tokens))
        return {self._place[name] for name in names} <= self._worth


class World:
    """A sequence, whose blocks are on the device or in drawn tiers."""

    def __init__(
        self, windows: Windows, draw: st.DataObject, share: int = 1, worth: frozenset[str] = frozenset()
    ) -> None:
        self.groups = CacheGroups(SIZE, 64, windows)
        self.sequence = Sequence("s", list(range(LENGTH)), SamplingParams(1), b"root", share=share)
        hashes: list[bytes] = []
        extend_chain(hashes, b"root", self.sequence.token_ids, SIZE)
        self.names = [[block_name(one, group) for one in hashes] for group in range(len(windows))]
        self.pool = BlockPool(64, num_shares=2)
        self.place: dict[bytes, Tier] = {}
        for name in [name for names in self.names for name in names]:
            for place in (
                draw.draw(st.sets(st.sampled_from(PLACES), max_size=2)) if draw.draw(st.booleans()) else {"device"}
            ):
                if place == "device":
                    self._cache(name, share)
                elif place is not None:
                    self.place[name] = place
            if draw.draw(st.booleans()):
                self._cache(name, 1 - share)  # a block of the other share, which must not be used
        self.tiers = Places(self.place, worth)
        self.lookup = PrefixLookup(self.pool, self.tiers, self.groups, shares_prefixes=True)

    def _cache(self, name: bytes, share: int) -> None:
        block = self.pool.allocate(share)
        assert block is not None
        self.pool.register(block, name)
        self.pool.release([block])

    def is_here(self, name: bytes) -> bool:
        return self.pool.has(name, self.sequence.share)

    def is_within(self, name: bytes, places: tuple[str, ...]) -> bool:
        return self.is_here(name) or self.place.get(name) in places

    def longest(self, places: tuple[str, ...] = ()) -> int:
        """Return the length, in blocks, of the longest prefix in which later tokens find all that they see."""
        fits = [
            n
            for n in range((LENGTH - 1) // SIZE + 1)
            if all(self.is_within(self.names[group][i], places) for i, group in self.groups.seen(n))
        ]
        return max(fits)

    def check(self, prefix: CachedPrefix, num_blocks: int, num_cached: int) -> None:
        """Check the fields of a prefix of `num_blocks` blocks."""
        seen = self.groups.seen(num_blocks)
        assert (prefix.num_blocks, prefix.num_cached) == (num_blocks, num_cached)
        here = [[self.names[g][i] for i, of in seen if of == g] for g in range(len(self.names))]
        find = partial(self.pool.find, default=-1, share=self.sequence.share)
        assert prefix.tables == [[find(name) for name in names] for names in here]
        assert sorted(prefix.cached) == sorted(find(name) for names in here for name in names if self.is_here(name))
        missing = [(i, g) for i, g in seen if not self.is_here(self.names[g][i])]
        assert list(prefix.missing) == missing
        assert list(prefix.names) == [self.names[g][i] for i, g in missing]
        places = [self.place[name] for name in prefix.names]
        assert prefix.num_behind == len([place for place in places if place != "host"])
        assert prefix.num_in_store == places.count("store")


@settings(deadline=None, max_examples=30)
@given(WINDOWS, st.integers(0, 1), st.data())
def test_what_is_cached_of_a_prompt_is_the_longest_prefix_of_which_all_is_there_that_is_seen(
    windows: Windows, share: int, draw: st.DataObject
) -> None:
    world = World(windows, draw, share)
    longest = world.longest()
    world.check(world.lookup.find_cached(world.sequence), longest, longest)
    names = [world.names[group][i] for i, group in world.groups.seen(6)]
    elsewhere = [name for name in names if not world.is_here(name) and world.place.get(name) != "host"]
    assert world.lookup.names_elsewhere(world.sequence) == elsewhere
    unknown = [name for of in world.names for name in of[:6] if not world.is_here(name) and name not in world.place]
    assert world.lookup.names_unknown(world.sequence) == unknown


@settings(deadline=None, max_examples=30)
@given(WINDOWS, st.frozensets(st.sampled_from(["host", "disk", "store"])), st.booleans(), st.data())
def test_a_longer_prefix_comes_from_as_far_as_that_pays(
    windows: Windows, worth: frozenset[str], was_read: bool, draw: st.DataObject
) -> None:
    world = World(windows, draw, worth=worth)
    if was_read:  # the blocks on disk and in the store have been requested before
        world.sequence.num_disk_blocks = 0
    cached = world.lookup.find_cached(world.sequence)
    found = world.lookup.find_in_tiers(world.sequence, cached)
    reaches = [("host",)] if was_read else [("host", "disk", "store"), ("host", "disk"), ("host",)]
    for places in reaches:
        longest = world.longest(places)
        if longest == cached.num_blocks:
            assert found is cached
            return
        names = [world.names[g][i] for i, g in world.groups.seen(longest) if not world.is_here(world.names[g][i])]
        if {world.place[name] for name in names} <= worth:
            world.check(found, longest, cached.num_blocks)
            assert world.tiers.asked[-1] == (found.names, (longest - cached.num_blocks) * SIZE)
            return
    assert found is cached


def test_nothing_is_found_for_who_needs_every_token_or_shares_none() -> None:
    pool = BlockPool(8)
    sequence = Sequence("s", list(range(LENGTH)), SamplingParams(1), b"root")
    extend_chain(hashes := [], b"root", sequence.token_ids, SIZE)  # type: ignore[var-annotated]
    block = pool.allocate()
    assert block is not None
    pool.register(block, hashes[0])
    groups = CacheGroups(SIZE, 64)
    assert PrefixLookup(pool, Tiers(), groups, shares_prefixes=True).find_cached(sequence).num_blocks == 1
    assert PrefixLookup(pool, Tiers(), groups, shares_prefixes=False).find_cached(sequence).num_blocks == 0
    whole = Sequence("w", list(range(LENGTH)), SamplingParams(1, prompt_logprobs=True), b"root")
    assert PrefixLookup(pool, Tiers(), groups, shares_prefixes=True).find_cached(whole).num_blocks == 0
