"""The lending of an arena's slabs among models: owners, transfers, and the choice of a slab.

A `Lease` holds the slabs that one model borrows, yields and reclaims. A `Reservation` is a run of slabs for one model only. `SlabMap` knows the owner
of each slab. `SlabPolicy` chooses slabs, and moves none. This module is independent of tensors, tokens and time.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from threading import RLock
from typing import NamedTuple, Protocol

from pilotlight.engine.kv.lending.slabs import SlabGrid
from pilotlight.engine.kv.pool.block_pool import BlockPool


class Oldest(NamedTuple):
    """A model's oldest sequence that has blocks, or the next one to admit if none has any."""

    arrival: tuple[float, int]  # the smallest is the oldest
    blocks: Sequence[int]  # blocks that the sequence holds
    num_missing: int  # blocks that its tokens need in addition


class SlabUser(Protocol):
    """The part of a model's scheduler that its lease uses (preemption.py)."""

    @property
    def has_work(self) -> bool: ...

    @property
    def is_alone(self) -> bool:
        """True if no sequence except the oldest one has blocks on its rank."""

    def oldest(self) -> Oldest | None: ...

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        """Preempt the youngest running sequence; return False if none may be preempted."""

    def preempt_holders(self, blocks: range) -> None: ...


class Capacity(NamedTuple):
    """The numbers of blocks of one model."""

    free_blocks: int  # blocks that a new sequence could take
    total_blocks: int


class Lease:
    """The slabs that one model borrows, and the blocks in them."""

    def __init__(self, slabs: "SlabMap", policy: "SlabPolicy", name: str, grid: SlabGrid) -> None:
        self.name = name
        self.grid = grid
        self.arrivals = slabs.arrivals  # counter of sequences across all models
        self.slabs: set[int] = set()
        self.max_blocks = 0  # blocks in all unreserved slabs
        self.user: SlabUser | None = None
        self.num_short = 0  # blocks that the model lacked in its latest schedule
        self.last_used = 0
        self.pool = BlockPool(0, grid.capacity, num_shares=grid.copies)
        self._is_refused = False  # True if an attempt to borrow a slab has failed in the latest schedule
        self._map = slabs
        self._policy = policy

    @property
    def is_busy(self) -> bool:
        return self.user is not None and self.user.has_work

    def serve(self, user: SlabUser) -> None:
        """Set the scheduler that must preempt sequences when other models are due slabs."""
        self.user = user

    def new_pool(self, on_forget: Callable[[int], None] = lambda block: None) -> BlockPool:
        """Give back every slab, drop its content, and return an empty pool for a new scheduler."""
        self._release_all()
        self.pool = BlockPool(0, self.grid.capacity, self._borrow, on_forget, num_shares=self.grid.copies)
        return self.pool

    def begin_schedule(self) -> None:
        """Hand over slabs that are due to other models."""
        slabs = self._map
        self._is_refused, self.num_short, self.last_used = False, 0, next(slabs.schedules)
        if not slabs.recalled and len(slabs.leases) < 2:
            return
        with slabs.lock:
            for slab in sorted(self.slabs & slabs.recalled.keys()):
                assert self.user is not None
                blocks = self.grid.blocks_in(slab)
                self.user.preempt_holders(blocks)
                if not self.pool.is_held(blocks):  # else a running copy still holds one: retry at the next schedule
                    slabs.move(slab, slabs.recalled[slab])
            while (claimant := self._policy.claimant_on(self)) is not None and self._yield_slab(claimant):
                pass

    def reclaim(self, num_blocks: int) -> bool:
        """Record that one share lacks `num_blocks` blocks.

        Returns True if another model yields slabs at its next schedule, so that waiting helps.
        """
        self.num_short += num_blocks * self.grid.copies
        with self._map.lock:
            return self._policy.borrower(self) is not None

    def capacity(self) -> Capacity:
        """Return the blocks that new sequences could take now, and the total that this model could have now."""
        total = max(self.max_blocks, self.pool.num_blocks)
        if any(other.slabs for other in self._map.leases if other is not self):
            with self._map.lock:
                total = self._policy.num_within_reach(self)
        return Capacity(total - self.pool.num_held, total)

    def close(self) -> None:
        with self._map.lock:
            self._release_all()
            self._map.leases.remove(self)

    def unheld(self, without: Collection[int] = ()) -> list[int]:
        """Return the slabs, except those in `without`, of which no sequence holds a block."""
        return [s for s in self.slabs if s not in without and not self.pool.is_held(self.grid.blocks_in(s))]

    def gain(self, slab: int) -> int:
        """Take a slab and return how many blocks it adds."""
        blocks = self.grid.completed_by(slab, self.slabs)
        self.slabs.add(slab)
        self.pool.add_blocks(blocks)
        return len(blocks)

    def lose(self, slab: int) -> None:
        self.slabs.remove(slab)
        self.pool.remove_blocks(self.grid.blocks_in(slab))

    def _borrow(self) -> bool:
        """Take a slab from which no sequence holds a block; return False if there is none."""
        if self._is_refused:
            return False
        with self._map.lock:
            slab = self._policy.slab_for(self)
            if slab is not None:
                self._map.move(slab, self)
        self._is_refused = slab is None
        return slab is not None

    def _yield_slab(self, claimant: "Lease") -> bool:
        """Give up one slab, with preemptions if needed; return False if that is impossible."""
        assert self.user is not None
        is_senior = self._policy.senior() is self
        while (slab := self._policy.cheapest(self, claimant)) is None:
            if not self.user.preempt_youngest(keep_oldest=is_senior):
                return False
        claimant.num_short -= self._map.move(slab, claimant)
        return True

    def _release_all(self) -> None:
        """Free every slab, or hand it to the reservation that recalls it; drop the content of its blocks."""
        with self._map.lock:
            self.pool = BlockPool(0, self.grid.capacity, num_shares=self.grid.copies)
            for slab in list(self.slabs):
                self._map.move(slab, self._map.recalled.get(slab))


class Reservation:
    """A run of slabs for one model only, from its load to its unload."""

    def __init__(self, slabs: "SlabMap", name: str, run: range) -> None:
        self.name = name
        self.slabs = run
        self._map = slabs

    def is_complete(self) -> bool:
        """Take the recalled slabs that no sequence uses; return True if no slab is missing any more."""
        slabs = self._map
        with slabs.lock:
            for slab in [slab for slab, caller in slabs.recalled.items() if caller is self]:
                owner = slabs.owners[slab]
                assert isinstance(owner, Lease), "only what a model borrows is recalled"
                if not owner.pool.is_held(owner.grid.blocks_in(slab)):
                    slabs.move(slab, self)
            return self not in slabs.recalled.values()

    def close(self) -> None:
        slabs = self._map
        with slabs.lock:
            for slab in self.slabs:
                slabs.reserved.remove(slab)
                if slabs.recalled.pop(slab, None) is None:
                    slabs.move(slab, None)
            slabs.set_limits()


class SlabMap:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """Make a map of free, zeroed slabs. `clear`: function that zeroes a slab that changes owners."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        # The loader's thread opens and closes models; the host's thread does everything else.
        self.lock = RLock()
        self.arrivals = count()  # counter of sequences across all models
        self.schedules = count(1)  # counter of schedules across all models
        self.owners: list[Lease | Reservation | None] = [None] * num_slabs
        self.recalled: dict[int, Reservation] = {}  # slabs that a lease must return -> the reservation that gets them
        self.reserved: set[int] = set()  # recalled slabs, and slabs of reservations
        self.leases: list[Lease] = []
        self._clear = clear

    @property
    def num_lendable(self) -> int:
        """The number of slabs that are not reserved."""
        return self.num_slabs - len(self.reserved)

    @property
    def busy(self) -> list[Lease]:
        """The leases of models that have work."""
        return [lease for lease in self.leases if lease.is_busy]

    def free_slabs(self) -> list[int]:
        return [slab for slab, owner in enumerate(self.owners) if owner is None]

    def unreserved_runs(self) -> Iterable[range]:
        start = 0
        for end in [*sorted(self.reserved), self.num_slabs]:
            if end > start:
                yield range(start, end)
            start = end + 1

    def move(self, slab: int, to: Lease | Reservation | None) -> int:
        """Zero a slab, give it to `to`, and return how many blocks `to` gains. The caller holds the lock."""
        owner = self.owners[slab]
        if isinstance(owner, Lease):
            owner.lose(slab)
        if owner is not None:
            self._clear(slab)
        self.recalled.pop(slab, None)
        self.owners[slab] = to
        return to.gain(slab) if isinstance(to, Lease) else 0

    def set_limits(self) -> None:
        """Update `max_blocks` of every lease after a change of reservations. The caller holds the lock."""
        lendable = set(range(self.num_slabs)) - self.reserved
        for lease in self.leases:
            lease.max_blocks = lease.grid.num_blocks(lendable)

    def assert_consistent(self) -> None:
        for slab, owner in enumerate(self.owners):
            assert (slab in self.reserved) == (isinstance(owner, Reservation) or slab in self.recalled)
            assert all((slab in lease.slabs) == (owner is lease) for lease in self.leases)
            assert slab not in self.recalled or isinstance(owner, Lease)
        for lease in self.leases:
            lease.pool.assert_consistent()
            assert lease.pool.num_blocks == lease.grid.num_blocks(lease.slabs)


class SlabPolicy:
    """The choice of slabs.

    A model that needs a block takes, in this order: a free block, a free slab, an unheld slab of an *idle* model (the least recently used first), an
    unheld slab of a busy model that has more than its fair share while this one has less, and only then its own cached blocks. If sequences hold all
    of those, it *reclaims* a slab from another model: from one above the fair share if it is itself below that share, or from any model if its own
    oldest sequence is the oldest of the whole host and runs alone. The other model yields the slab at its next schedule, by preempting its youngest
    sequences. So every model has its share when it has work, and the oldest sequence of the host always advances, even one as long as the arena:
    every sequence ends.
    """

    def __init__(self, slabs: SlabMap) -> None:
        self._map = slabs

    def slab_for(self, lease: Lease) -> int | None:
        """Choose a slab that the model can take because no sequence holds a block of it, or None."""
        if free := self._map.free_slabs():
            return min(free, key=lambda slab: (-len(lease.grid.completed_by(slab, lease.slabs)), slab))
        others = [a for a in self._map.leases if a is not lease and a.slabs]
        for other in sorted((a for a in others if not a.is_busy), key=lambda a: a.last_used):
            if (slab := self.cheapest(other, lease)) is not None:
                return slab
        share = self._share(lease)
        if len(lease.slabs) < share:
            for other in sorted((a for a in others if a.is_busy), key=lambda a: -len(a.slabs)):
                if len(other.slabs) > share and self._can_yield(other):
                    slab = self.cheapest(other, lease)
                    if slab is not None:
                        return slab
        return None

    def cheapest(self, owner: Lease, taker: Lease) -> int | None:
        """Choose the owner's unheld slab with fewest cached blocks, or None.

        Of equals, choose one that adds most blocks to `taker`.
        """
        slabs = owner.unheld(self._map.recalled)

        def cost(slab: int) -> tuple[int, int, int]:
            cached = owner.pool.num_cached(owner.grid.blocks_in(slab))
            return cached, -len(taker.grid.completed_by(slab, taker.slabs)), slab

        return min(slabs, key=cost) if slabs else None

    def borrower(self, claimant: Lease) -> Lease | None:
        """Choose the model that must yield slabs to `claimant`, which found none to borrow, or None."""
        others = [a for a in self._map.busy if a is not claimant and a.slabs - self._map.recalled.keys()]
        share = self._share(claimant)
        if len(claimant.slabs) < share:
            above = [a for a in others if len(a.slabs) > share and self._can_yield(a)]
            if above:
                return max(above, key=lambda a: len(a.slabs))
        if others and claimant.user is not None and claimant.user.is_alone and self.senior() is claimant:
            return max(others, key=lambda a: len(a.slabs))
        return None

    def claimant_on(self, lease: Lease) -> Lease | None:
        """Choose, of the models to which this one must yield slabs, that with the fewest slabs, or None."""
        claimants = [a for a in self._map.busy if a.num_short > 0 and self.borrower(a) is lease]
        return min(claimants, key=lambda a: len(a.slabs)) if claimants else None

    def senior(self) -> Lease | None:
        """Return the lease of the model with the oldest sequence of the host, or None."""
        oldest = [
            (oldest.arrival, lease)
            for lease in self._map.busy
            if lease.user is not None and (oldest := lease.user.oldest()) is not None
        ]
        return min(oldest, key=lambda pair: pair[0])[1] if oldest else None

    def num_within_reach(self, lease: Lease) -> int:
        """Return how many blocks the model could have now: its own, and those it can borrow or reclaim."""
        share = self._share(lease)
        reach = lease.slabs | set(self._map.free_slabs())
        for other in self._map.leases:
            if other is not lease:
                unheld = other.unheld(self._map.recalled)
                reach.update(unheld if not other.is_busy else unheld[: max(0, len(other.slabs) - share)])
        reclaimable = max(0, share - len(reach)) * (
            lease.grid.copies * (self._map.slab_bytes // lease.grid.block_bytes)
        )
        return max(min(lease.grid.num_blocks(reach) + reclaimable, lease.max_blocks), lease.pool.num_blocks)

    def place_for(self, num_slabs: int) -> range:
        """Choose the run with the most free slabs; of equals the highest, because models borrow low slabs."""
        starts = [i for run in self._map.unreserved_runs() for i in range(run.start, run.stop - num_slabs + 1)]
        first = min(starts, key=lambda i: (num_slabs - self._map.owners[i : i + num_slabs].count(None), -i))
        return range(first, first + num_slabs)

    def _share(self, lease: Lease) -> int:
        """Return the number of slabs that are the fair share of this model and of each other model with work."""
        return self._map.num_lendable // len({lease, *self._map.busy})

    def _can_yield(self, lease: Lease) -> bool:
        pinned, needed = self._pinned(lease)
        return len(lease.slabs - pinned - self._map.recalled.keys()) > needed

    def _pinned(self, lease: Lease) -> tuple[set[int], int]:
        """Return the slabs of the host's oldest sequence and how many more it needs.

        If the sequence is not this model's, return no slabs and 0.
        """
        oldest = lease.user.oldest() if lease.user is not None and self.senior() is lease else None
        if oldest is None:
            return set(), 0
        per_slab = max(1, self._map.slab_bytes // lease.grid.block_bytes - 1)
        return lease.grid.slabs_of(oldest.blocks), -(-oldest.num_missing // per_slab)
