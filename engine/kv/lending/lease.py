"""The arena lent among models, slab by slab: who has each slab, how one changes hands, and which one a model gives up when another lacks blocks.

A `Lease` is what one model borrows, yields and reclaims; a `Reservation` a run of slabs that is one model's own; `SlabMap` knows the owner of each
slab; `SlabPolicy` chooses, and moves nothing. Refuses to know tensors, tokens and time.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from threading import RLock
from typing import NamedTuple, Protocol

from pilotlight.engine.kv.lending.slabs import SlabGrid
from pilotlight.engine.kv.pool.block_pool import BlockPool


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

    def serve(self, user: SlabUser) -> None:
        """Ask this scheduler from now on, when slabs are due to another model."""
        self.user = user

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


class SlabMap:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """`clear` zeroes a slab; free slabs hold zeros."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        # models are opened and closed by the loader's thread, everything else happens in the host's
        self.lock = RLock()
        self.arrivals = count()  # numbers sequences across all models
        self.schedules = count(1)  # likewise schedules
        self.owners: list[Lease | Reservation | None] = [None] * num_slabs
        self.recalled: dict[int, Reservation] = {}  # slabs that their owner must leave for a reservation
        self.reserved: set[int] = set()  # these, and those that reservations have
        self.leases: list[Lease] = []
        self._clear = clear

    @property
    def num_lendable(self) -> int:
        """Slabs that are not reserved."""
        return self.num_slabs - len(self.reserved)

    @property
    def busy(self) -> list[Lease]:
        """The models that have work."""
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
        """Hand over a slab, emptied, and return how many blocks that brings. The caller has the lock."""
        owner = self.owners[slab]
        if isinstance(owner, Lease):
            owner.lose(slab)
        if owner is not None:
            self._clear(slab)
        self.recalled.pop(slab, None)
        self.owners[slab] = to
        return to.gain(slab) if isinstance(to, Lease) else 0

    def set_limits(self) -> None:
        """Tell every model how many blocks it could ever have. The caller has the lock, and has changed what is reserved."""
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
    """A model that needs a block takes, in this order: one of its own free ones, a free slab, an unheld slab of an *idle* model (the one unused for
    longest first), an unheld slab of a busy model that has more than its fair share while this one has less, and only then its own cached blocks.
    When all of those are held by sequences, it *reclaims*: from a model above its share while it is below its own; or, when its oldest sequence is
    the oldest of the whole host and runs alone, from any. The borrower yields at its next schedule, by preempting its youngest sequences. So every
    model has its share when it has work, and the oldest sequence of the host always advances, be it as long as the arena: every sequence ends."""

    def __init__(self, slabs: SlabMap) -> None:
        self._map = slabs

    def slab_for(self, lease: Lease) -> int | None:
        """Choose a slab that the model may have without disturbing any sequence."""
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
        """Choose, of the owner's unheld slabs, the one with the fewest cached blocks; of equals the one that brings most."""
        slabs = owner.unheld(self._map.recalled)

        def cost(slab: int) -> tuple[int, int, int]:
            cached = owner.pool.num_cached(owner.grid.blocks_in(slab))
            return cached, -len(taker.grid.completed_by(slab, taker.slabs)), slab

        return min(slabs, key=cost) if slabs else None

    def borrower(self, claimant: Lease) -> Lease | None:
        """Choose the model that must yield to one that found nothing to borrow."""
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
        """Choose the model that this one must yield to."""
        claimants = [a for a in self._map.busy if a.num_short > 0 and self.borrower(a) is lease]
        return min(claimants, key=lambda a: len(a.slabs)) if claimants else None

    def senior(self) -> Lease | None:
        """Return the model with the oldest sequence."""
        oldest = [
            (oldest.arrival, lease)
            for lease in self._map.busy
            if lease.user is not None and (oldest := lease.user.oldest()) is not None
        ]
        return min(oldest, key=lambda pair: pair[0])[1] if oldest else None

    def num_within_reach(self, lease: Lease) -> int:
        """Count the blocks that the model could have now: its own, those it could borrow, and those of its share at least."""
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
        """Choose the run to reserve that disturbs others least, as far up as possible: models borrow from below."""
        starts = [i for run in self._map.unreserved_runs() for i in range(run.start, run.stop - num_slabs + 1)]
        first = min(starts, key=lambda i: (num_slabs - self._map.owners[i : i + num_slabs].count(None), -i))
        return range(first, first + num_slabs)

    def _share(self, lease: Lease) -> int:
        """Count the slabs that each model with work has a right to."""
        return self._map.num_lendable // len({lease, *self._map.busy})

    def _can_yield(self, lease: Lease) -> bool:
        pinned, needed = self._pinned(lease)
        return len(lease.slabs - pinned - self._map.recalled.keys()) > needed

    def _pinned(self, lease: Lease) -> tuple[set[int], int]:
        """Return the senior model's slabs in which its oldest sequence lies, and how many more it will need."""
        oldest = lease.user.oldest() if lease.user is not None and self.senior() is lease else None
        if oldest is None:
            return set(), 0
        per_slab = max(1, self._map.slab_bytes // lease.grid.block_bytes - 1)
        return lease.grid.slabs_of(oldest.blocks), -(-oldest.num_missing // per_slab)
