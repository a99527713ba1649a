"""One model's part of the arena: a lease, by which it borrows slabs, yields and reclaims them, or a reservation, a run of slabs that is its own.

Knows one model's slabs and blocks, and when some are due to another; which those are is slab_policy.py's choice.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.kv.block_pool import BlockPool
from engine.kv.slabs import SlabGrid

if TYPE_CHECKING:
    from engine.kv.slab_map import SlabMap
    from engine.kv.slab_policy import SlabPolicy


class Oldest(NamedTuple):
    """A model's oldest running sequence, or the one that is next to run when none does."""

    arrival: int
    blocks: Sequence[int]  # that it holds
    num_missing: int  # blocks until all its tokens have a place


class SlabUser(Protocol):
    """A model's scheduler as its lease knows it."""

    @property
    def has_work(self) -> bool: ...

    @property
    def is_alone(self) -> bool:
        """Tell whether no sequence runs beside the oldest."""

    def oldest(self) -> Oldest | None: ...

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        """False if there is none to preempt."""

    def preempt_holders(self, blocks: range) -> None: ...


class Capacity(NamedTuple):
    """The blocks of one model."""

    free_blocks: int  # that a new sequence could take
    total_blocks: int


class Lease:
    """The slabs that one model borrows, and the blocks in them."""

    def __init__(self, slabs: "SlabMap", policy: "SlabPolicy", name: str, grid: SlabGrid) -> None:
        self.name = name
        self.grid = grid
        self.arrivals = slabs.arrivals  # numbers sequences across all models
        self.slabs: set[int] = set()
        self.max_blocks = 0  # it could ever have: in all slabs that are not reserved
        self.user: SlabUser | None = None
        self.num_short = 0  # blocks that it lacked when it last scheduled
        self.last_used = 0
        self.pool = BlockPool(0, grid.capacity, num_shares=grid.copies)
        self._is_refused = False  # there is nothing to borrow before the next schedule
        self._map = slabs
        self._policy = policy

    @property
    def is_busy(self) -> bool:
        return self.user is not None and self.user.has_work

    def new_pool(self, on_forget: Callable[[int], None] = lambda block: None) -> BlockPool:
        """Give back every slab, whatever is in it, and return the pool of a new scheduler."""
        self._release_all()
        self.pool = BlockPool(0, self.grid.capacity, self._borrow, on_forget, num_shares=self.grid.copies)
        return self.pool

    def begin_schedule(self) -> None:
        """Hand over what other models are due."""
        slabs = self._map
        self._is_refused, self.num_short, self.last_used = False, 0, next(slabs.schedules)
        if not slabs.recalled and len(slabs.leases) < 2:
            return
        with slabs.lock:
            for slab in sorted(self.slabs & slabs.recalled.keys()):
                assert self.user is not None
                blocks = self.grid.blocks_in(slab)
                self.user.preempt_holders(blocks)
                if not self.pool.is_held(blocks):  # else by a copy under way: next time
                    slabs.move(slab, slabs.recalled[slab])
            while (claimant := self._policy.claimant_on(self)) is not None and self._yield_slab(claimant):
                pass

    def reclaim(self, num_blocks: int) -> bool:
        """Note that so many blocks are missing, of one share. True if another model yields slabs at its next schedule, for which it is worth
        waiting."""
        self.num_short += num_blocks * self.grid.copies
        with self._map.lock:
            return self._policy.borrower(self) is not None

    def capacity(self) -> Capacity:
        """Return how many blocks a new sequence could take, and how many this model could have as things are."""
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
        """Return the slabs that could go at once, since no sequence holds a block of them."""
        return [s for s in self.slabs if s not in without and not self.pool.is_held(self.grid.blocks_in(s))]

    def gain(self, slab: int) -> int:
        """Take a slab and return how many blocks it brings."""
        blocks = self.grid.completed_by(slab, self.slabs)
        self.slabs.add(slab)
        self.pool.add_blocks(blocks)
        return len(blocks)

    def lose(self, slab: int) -> None:
        self.slabs.remove(slab)
        self.pool.remove_blocks(self.grid.blocks_in(slab))

    def _borrow(self) -> bool:
        """Add a slab without disturbing any sequence; False if there is none."""
        if self._is_refused:
            return False
        with self._map.lock:
            slab = self._policy.slab_for(self)
            if slab is not None:
                self._map.move(slab, self)
        self._is_refused = slab is None
        return slab is not None

    def _yield_slab(self, claimant: "Lease") -> bool:
        """Move one slab, if sequences must be preempted for it. False if nothing helps."""
        assert self.user is not None
        is_senior = self._policy.senior() is self
        while (slab := self._policy.cheapest(self, claimant)) is None:
            if not self.user.preempt_youngest(keep_oldest=is_senior):
                return False
        claimant.num_short -= self._map.move(slab, claimant)
        return True

    def _release_all(self) -> None:
        """Free every slab, or hand it to the reservation that waits for it; the blocks' content is lost."""
        with self._map.lock:
            self.pool = BlockPool(0, self.grid.capacity, num_shares=self.grid.copies)
            for slab in list(self.slabs):
                self._map.move(slab, self._map.recalled.get(slab))


class Reservation:
    """A run of slabs that one model has for itself from its load to its unload."""

    def __init__(self, slabs: "SlabMap", name: str, run: range) -> None:
        self.name = name
        self.slabs = run
        self._map = slabs

    def is_complete(self) -> bool:
        """Tell whether other models have left all of its slabs. Unheld ones are taken by asking."""
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
