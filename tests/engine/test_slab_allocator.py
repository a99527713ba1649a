"""The slab allocator without memory or models: the order of borrowing, fair shares, reclaims and reservations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.kv.lending.lease import Lease, Oldest
from pilotlight.engine.kv.lending.slab_allocator import NoSlabsError, SlabAllocator
from pilotlight.engine.kv.lending.slabs import SlabGrid

SLAB, BLOCK = 100, 50  # two blocks per slab


@dataclass
class Job:
    """A fake scheduler of one model: its lease, and its sequences as (arrival, blocks), oldest first."""

    lease: Lease
    sequences: list[tuple[int, list[int]]] = field(default_factory=list)
    missing: int = 0  # number of blocks that the oldest sequence lacks
    is_waiting: bool = False
    preempted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lease.new_pool()
        self.lease.serve(self)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self.is_waiting

    @property
    def is_alone(self) -> bool:
        return len(self.sequences) <= 1

    def oldest(self) -> Oldest | None:
        return Oldest(*self.sequences[0], self.missing) if self.sequences else None

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        if len(self.sequences) <= keep_oldest:
            return False
        self._preempt(self.sequences[-1])
        return True

    def preempt_holders(self, blocks: range) -> None:
        for sequence in [s for s in self.sequences if set(s[1]) & set(blocks)]:
            self._preempt(sequence)

    def _preempt(self, sequence: tuple[int, list[int]]) -> None:
        self.sequences.remove(sequence)
        self.lease.pool.release(sequence[1])
        self.preempted.append(sequence[0])
        self.is_waiting = True

    def run(self, arrival: int, num_blocks: int) -> None:
        blocks = [self.lease.pool.allocate() for _ in range(num_blocks)]
        assert None not in blocks
        self.sequences.append((arrival, [block for block in blocks if block is not None]))

    def end(self, cached: bool = False) -> None:
        """End the oldest sequence; leave its blocks in the cache if `cached`."""
        arrival, blocks = self.sequences.pop(0)
        for block in blocks if cached else []:
            self.lease.pool.register(block, b"%d %d" % (arrival, block))
        self.lease.pool.release(blocks)


@dataclass
class WatchedJob(Job):
    """A fake scheduler that calls `on_look` whenever it is asked for work."""

    on_look: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        self.on_look()
        return super().has_work


def lend(num_slabs: int, *names: str) -> tuple[SlabAllocator, list[Job]]:
    allocator = SlabAllocator(num_slabs, SLAB, lambda slab: None)
    return allocator, [Job(allocator.open(name, BLOCK)) for name in names]


def sizes(jobs: list[Job]) -> list[int]:
    return [len(job.lease.slabs) for job in jobs]


def test_one_model_alone_may_have_everything() -> None:
    _, (a, idle) = lend(4, "a", "idle")
    a.run(0, 8)
    assert sizes([a, idle]) == [4, 0]
    assert a.lease.pool.allocate() is None


def test_a_free_slab_is_taken_before_any_cache_and_an_idle_models_before_ones_own() -> None:
    _, (a, b) = lend(4, "a", "b")
    b.run(0, 2)
    b.end(cached=True)
    a.run(1, 2)
    a.end(cached=True)
    a.run(2, 4)
    assert sizes([a, b]) == [3, 1], "the two free slabs are taken first"
    assert b.lease.pool.num_cached(range(8)) == 2
    a.lease.begin_schedule()
    a.run(3, 2)
    assert sizes([a, b]) == [4, 0], "then the slab with the idle model's cache"
    assert a.lease.pool.num_cached(range(8)) == 2, "its own cache goes last"
    a.lease.begin_schedule()
    a.run(4, 2)
    assert a.lease.pool.num_cached(range(8)) == 0


def test_of_idle_models_the_one_unused_for_longest_gives_first() -> None:
    _, (a, b, c) = lend(3, "a", "b", "c")
    for job in (b, c):
        job.lease.begin_schedule()
        job.run(0, 2)
        job.end(cached=True)
    b.lease.begin_schedule()
    a.run(1, 4)
    assert sizes([a, b, c]) == [2, 1, 0]


def test_a_busy_models_cache_is_taken_down_to_its_share_and_no_further() -> None:
    _, (a, b) = lend(6, "a", "b")
    b.run(0, 12)
    b.end(cached=True)
    b.is_waiting = True
    a.run(1, 6)
    assert sizes([a, b]) == [3, 3]
    assert a.lease.pool.allocate() is None


def test_a_burst_takes_its_share_back_from_the_youngest_sequences() -> None:
    _, (a, b) = lend(6, "a", "b")
    for arrival in range(6):
        b.run(arrival, 2)
    a.is_waiting = True
    assert a.lease.pool.allocate() is None
    assert a.lease.reclaim(6), "the other model will return slabs, so it is worth waiting"
    b.lease.begin_schedule()
    assert sizes([a, b]) == [3, 3]
    assert b.preempted == [5, 4, 3]
    a.lease.begin_schedule()
    assert not a.lease.reclaim(1), "both models have their fair share"
    b.lease.begin_schedule()
    assert sizes([a, b]) == [3, 3]


def test_a_claim_is_not_paid_beyond_the_missing_amount() -> None:
    _, (a, b) = lend(6, "a", "b")
    for arrival in range(6):
        b.run(arrival, 2)
    a.is_waiting = True
    a.lease.reclaim(1)
    b.lease.begin_schedule()
    assert sizes([a, b]) == [1, 5]


def test_the_oldest_sequence_of_all_may_take_everything_once_it_runs_alone() -> None:
    _, (a, b) = lend(6, "a", "b")
    a.run(0, 6)
    b.run(1, 2)
    b.run(2, 4)
    assert a.lease.reclaim(6)
    b.lease.begin_schedule()
    assert sizes([a, b]) == [6, 0]
    assert b.preempted == [2, 1]


def test_the_oldest_sequence_is_never_preempted_for_a_share() -> None:
    _, (a, b) = lend(6, "a", "b")
    b.run(0, 10)
    b.run(1, 2)
    a.is_waiting = True
    assert a.lease.reclaim(6)
    b.lease.begin_schedule()
    assert b.preempted == [1]
    assert sizes([a, b]) == [1, 5]
    a.lease.begin_schedule()
    assert not a.lease.reclaim(4)


def test_what_the_oldest_sequence_still_needs_is_not_robbed() -> None:
    _, (a, b) = lend(6, "a", "b")
    b.run(0, 4)
    b.run(1, 8)
    b.sequences[1:], gone = [], b.sequences[1]
    b.lease.pool.release(gone[1])
    b.missing = 4
    a.is_waiting = True
    assert a.lease.pool.allocate() is None
    b.missing = 0
    a.lease.begin_schedule()
    assert a.lease.pool.allocate() is not None


def test_a_younger_sequence_that_runs_beside_others_claims_nothing_beyond_the_share() -> None:
    _, (a, b) = lend(6, "a", "b")
    a.run(0, 3)
    a.run(1, 3)
    b.run(2, 6)
    assert not a.lease.reclaim(1), "its own youngest sequence must be preempted first"


def test_reservations_lie_above_and_call_back_what_is_lent() -> None:
    allocator, (a,) = lend(6, "a")
    a.run(0, 6)
    a.run(1, 6)
    own = allocator.reserve("own", 2)
    assert own.slabs == range(4, 6)
    assert not own.is_complete()
    assert a.lease.max_blocks == 8
    a.lease.begin_schedule()
    assert own.is_complete()
    assert a.preempted == [1]
    allocator.assert_consistent()
    with pytest.raises(NoSlabsError, match="4 contiguous slabs are needed, 3 are available"):
        allocator.reserve("more", 4)
    own.close()
    assert a.lease.max_blocks == 12
    allocator.assert_consistent()


def test_a_reservation_takes_idle_slabs_at_once_and_may_end_before_it_is_complete() -> None:
    allocator, (a,) = lend(4, "a")
    a.run(0, 8)
    own = allocator.reserve("own", 3)
    own.close()
    assert sizes([a]) == [4]
    allocator.assert_consistent()
    a.end(cached=True)
    own = allocator.reserve("own", 3)
    assert own.is_complete()
    assert sizes([a]) == [1]


def test_a_model_that_leaves_gives_everything_back() -> None:
    allocator, (a, b) = lend(4, "a", "b")
    a.run(0, 3)
    b.run(1, 3)
    a.lease.close()
    assert allocator.num_free == 2
    a.lease = b.lease
    b.lease.new_pool()
    assert allocator.num_free == 4, "a new scheduler keeps no slabs either"
    allocator.assert_consistent()


def test_what_a_model_could_have_counts_the_idle_and_its_share_of_the_busy() -> None:
    _, (a, b) = lend(6, "a", "b")
    assert a.lease.capacity() == (12, 12)
    b.run(0, 12)
    assert b.lease.capacity() == (0, 12)
    assert a.lease.capacity() == (6, 6), "half of the busy model's blocks could be reclaimed"
    b.end(cached=True)
    assert a.lease.capacity() == (12, 12)


def test_models_without_work_have_no_share() -> None:
    _, (a, b, *_) = lend(6, "a", "b", "idle", "idle too")
    b.run(0, 12)
    assert a.lease.capacity() == (6, 6)


def test_what_a_model_could_have_counts_what_is_free_beyond_its_share() -> None:
    _, (a, b) = lend(6, "a", "b")
    b.run(0, 2)
    assert a.lease.capacity() == (10, 10)


def test_a_block_of_more_than_half_a_slab_is_refused() -> None:
    allocator = SlabAllocator(4, SLAB, lambda slab: None)
    with pytest.raises(NoSlabsError, match="one block takes 51 bytes, more than half of a slab"):
        allocator.open("a", 51)
    allocator.reserve("own", 4)
    with pytest.raises(NoSlabsError, match="no slab is left"):
        allocator.open("a", 1)


@given(st.integers(1, 8), st.integers(2, 40), st.data())
@settings(deadline=None)
def test_owned_slabs_bring_exactly_the_blocks_that_lie_in_them(
    num_slabs: int, slab_bytes: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, 3))
    grid = SlabGrid(num_slabs, slab_bytes, data.draw(st.integers(1, slab_bytes // 2)), copies)
    owned: set[int] = set()
    usable: set[int] = set()
    for slab in data.draw(st.lists(st.integers(0, num_slabs - 1), max_size=20)):
        if slab in owned:
            owned.remove(slab)
            usable -= set(grid.blocks_in(slab))
        else:
            brought = grid.completed_by(slab, owned)
            assert len(brought) >= copies
            assert not usable & set(brought)
            usable |= set(brought)
            owned.add(slab)
        inside = {b for b in range(grid.capacity) if all(byte // slab_bytes in owned for byte in bytes_of(grid, b))}
        assert usable == inside
        assert grid.num_blocks(owned) == len(usable)
        assert grid.slabs_of(usable) <= owned


def bytes_of(grid: SlabGrid, block: int) -> range:
    there = block // grid.copies
    return range(there * grid.block_bytes, (there + 1) * grid.block_bytes)


def test_the_hosts_oldest_sequence_is_preempted_for_no_other() -> None:
    """Preempting the oldest sequence would leave only blocks of a younger one, which a tier is still filling."""
    _, (a, b) = lend(4, "a", "b")
    a.run(0, 2)
    for _ in range(4):
        a.lease.pool.allocate()
    b.is_waiting = True
    b.run(1, 2)
    assert sizes([a, b]) == [3, 1]
    b.lease.begin_schedule()
    assert b.lease.reclaim(2)
    a.lease.begin_schedule()
    assert a.preempted == []
    assert sizes([a, b]) == [3, 1]


def test_a_slab_is_looked_for_while_no_model_is_opened_or_closed() -> None:
    allocator, (a,) = lend(4, "a")
    held: list[bool] = []

    def try_to_open() -> None:
        is_free = allocator._map.lock.acquire(blocking=False)
        held.append(not is_free)
        if is_free:
            allocator._map.lock.release()

    def open_beside() -> None:
        loader = Thread(target=try_to_open)
        loader.start()
        loader.join()

    idle = WatchedJob(allocator.open("idle", BLOCK))
    idle.run(0, 8)
    idle.end()
    idle.on_look = open_beside
    a.run(1, 2)
    assert sizes([a, idle]) == [1, 3]
    assert held
    assert all(held)
