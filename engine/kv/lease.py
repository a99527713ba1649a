"""One model's part of the arena: a lease, whose slabs come and go, or a reservation, a run of slabs that is its own.

Knows one model's slabs and blocks; refuses to know the other models (slab_allocator.py).
"""

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.kv.block_pool import BlockPool
from engine.kv.slabs import SlabGrid

if TYPE_CHECKING:
    from engine.kv.slab_allocator import SlabAllocator


class Oldest(NamedTuple):
    """A model's oldest running sequence, or the one that is next to run when none does."""

    arrival: int
    blocks: Sequence[int]  # that it holds
    num_missing: int  # blocks until all its tokens have a place


class SlabUser(Protocol):
    """A model's scheduler as the allocator knows it."""

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

    def __init__(self, allocator: "SlabAllocator", name: str, grid: SlabGrid) -> None:
        self.name = name
        self.grid = grid
        self.slabs: set[int] = set()
        self.max_blocks = 0  # it could ever have: in all slabs that are not reserved
        self.user: SlabUser | None = None
        self.num_short = 0  # blocks that it lacked when it last scheduled
        self.last_used = 0
        self.is_refused = False  # there is nothing to borrow before the next schedule
        self._allocator = allocator
        self.pool = BlockPool(0, grid.capacity, num_shares=grid.copies)

    @property
    def arrivals(self) -> "count[int]":
        """Numbers sequences across all models."""
        return self._allocator.arrivals

    @property
    def is_busy(self) -> bool:
        return self.user is not None and self.user.has_work

    def new_pool(self, on_forget: Callable[[int], None] = lambda block: None) -> BlockPool:
        """Give back every slab, whatever is in it, and return the pool of a new scheduler."""
        self._allocator.release_all(self)
        self.pool = BlockPool(
            0, self.grid.capacity, lambda: self._allocator.lend(self), on_forget, num_shares=self.grid.copies
        )
        return self.pool

    def begin_schedule(self) -> None:
        """Hand over what other models are due."""
        self._allocator.begin_schedule(self)

    def reclaim(self, num_blocks: int) -> bool:
        """Note that so many blocks are missing, of one share. True if another model yields slabs at its next schedule, for which it is worth
        waiting."""
        self.num_short += num_blocks * self.grid.copies
        return self._allocator.borrower(self) is not None

    def capacity(self) -> Capacity:
        """Return how many blocks a new sequence could take, and how many this model could have as things are."""
        total = self._allocator.num_within_reach(self)
        return Capacity(total - self.pool.num_held, total)

    def close(self) -> None:
        self._allocator.close(self)

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


class Reservation:
    """A run of slabs that one model has for itself from its load to its unload."""

    def __init__(self, allocator: "SlabAllocator", name: str, slabs: range) -> None:
        self.name = name
        self.slabs = slabs
        self._allocator = allocator

    def is_complete(self) -> bool:
        """Tell whether other models have left all of its slabs. Unheld ones are taken by asking."""
        return self._allocator.collect(self)

    def close(self) -> None:
        self._allocator.end(self)
