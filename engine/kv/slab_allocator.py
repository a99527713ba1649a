"""Moves slabs of the arena between models: leases that borrow, yield and reclaim, and reservations.

Which slab goes is slab_policy.py's choice; who has which stands in slab_map.py. Knows slab numbers and counts; refuses to know tensors, tokens and
time. Models are opened and closed by the loader's thread, everything else happens in the host's: hence the lock.
"""

from collections.abc import Callable
from itertools import count
from threading import RLock

from engine.kv.block_pool import BlockPool
from engine.kv.lease import Lease, Reservation
from engine.kv.slab_map import SlabMap
from engine.kv.slab_policy import SlabPolicy
from engine.kv.slabs import SlabGrid


class NoSlabsError(Exception):
    """The arena has no room for another model."""


class SlabAllocator:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """`clear` zeroes a slab; free slabs hold zeros."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.arrivals = count()
        self._clear = clear
        self._map = SlabMap(num_slabs, slab_bytes)
        self._policy = SlabPolicy(self._map)
        self._clock = count(1)
        self._lock = RLock()

    @property
    def num_free(self) -> int:
        return len(self._map.free_slabs())

    @property
    def num_lendable(self) -> int:
        """Slabs that are not reserved."""
        return self._map.num_lendable

    @property
    def largest_run(self) -> int:
        """Slabs side by side that a reservation could have. One is left where models borrow."""
        with self._lock:
            longest = max((len(run) for run in self._map.unreserved_runs()), default=0)
            return min(longest, self._map.num_lendable - bool(self._map.leases))

    def open(self, name: str, block_bytes: int, copies: int = 1) -> Lease:
        """Let a model borrow. `copies`: ranks that have blocks of their own in each slab. Raises NoSlabsError."""
        grid = SlabGrid(self.num_slabs, self.slab_bytes, block_bytes, copies)
        with self._lock:
            if self._map.num_lendable == 0:
                raise NoSlabsError("nothing of it is left to borrow")
            if not grid.fits:
                raise NoSlabsError(
                    f"one block takes {block_bytes} bytes, more than half of a slab ({self.slab_bytes} bytes)"
                )
            lease = Lease(self, name, grid)
            self._map.leases.append(lease)
            self._set_limits()
        return lease

    def reserve(self, name: str, num_slabs: int) -> Reservation:
        """Give a model a run of slabs of its own. Raises NoSlabsError."""
        slabs = self._map
        with self._lock:
            if num_slabs > self.largest_run:
                raise NoSlabsError(f"{num_slabs} slabs side by side are wanted, {self.largest_run} can be had")
            reservation = Reservation(self, name, self._policy.place_for(num_slabs))
            for slab in reservation.slabs:
                slabs.reserved.add(slab)
                if slabs.owners[slab] is None:
                    slabs.owners[slab] = reservation
                else:
                    slabs.recalled[slab] = reservation
            self._set_limits()
        return reservation

    def close(self, lease: Lease) -> None:
        with self._lock:
            self.release_all(lease)
            self._map.leases.remove(lease)

    def end(self, reservation: Reservation) -> None:
        with self._lock:
            for slab in reservation.slabs:
                self._map.reserved.remove(slab)
                if self._map.recalled.pop(slab, None) is None:
                    self._move(slab, None)
            self._set_limits()

    def collect(self, reservation: Reservation) -> bool:
        """Take the reservation's slabs that are no longer held. True once it has all of them."""
        recalled = self._map.recalled
        with self._lock:
            for slab in [slab for slab, caller in recalled.items() if caller is reservation]:
                owner = self._map.owners[slab]
                assert isinstance(owner, Lease), "only what a model borrows is recalled"
                if not owner.pool.is_held(owner.grid.blocks_in(slab)):
                    self._move(slab, reservation)
            return reservation not in recalled.values()

    def release_all(self, lease: Lease) -> None:
        """Free every slab of the model, or hand it to the reservation that waits for it; the blocks' content is lost."""
        with self._lock:
            lease.pool = BlockPool(0, lease.grid.capacity, num_shares=lease.grid.copies)
            for slab in list(lease.slabs):
                self._move(slab, self._map.recalled.get(slab))

    def begin_schedule(self, lease: Lease) -> None:
        """Hand over what other models are due, before the lease's model schedules."""
        lease.is_refused = False
        lease.last_used = next(self._clock)
        lease.num_short = 0
        recalled = self._map.recalled
        if not recalled and len(self._map.leases) < 2:
            return
        with self._lock:
            for slab in sorted(lease.slabs & recalled.keys()):
                assert lease.user is not None
                lease.user.preempt_holders(lease.grid.blocks_in(slab))
                if not lease.pool.is_held(lease.grid.blocks_in(slab)):  # else by a copy under way: next time
                    self._move(slab, recalled[slab])
            while (claimant := self._policy.claimant_on(lease)) is not None and self._yield_slab(lease, claimant):
                pass

    def lend(self, lease: Lease) -> bool:
        """Add a slab to the lease without disturbing any sequence; False if there is none."""
        if lease.is_refused:
            return False
        with self._lock:
            slab = self._policy.slab_for(lease)
            if slab is None:
                lease.is_refused = True
                return False
            self._move(slab, lease)
            return True

    def borrower(self, claimant: Lease) -> Lease | None:
        """Return the model that must yield to one that found nothing to borrow."""
        with self._lock:
            return self._policy.borrower(claimant)

    def num_within_reach(self, lease: Lease) -> int:
        """Return how many blocks the model could have now."""
        if not any(other.slabs for other in self._map.leases if other is not lease):
            return max(lease.max_blocks, lease.pool.num_blocks)
        with self._lock:
            return self._policy.num_within_reach(lease)

    def assert_consistent(self) -> None:
        self._map.assert_consistent()

    def _yield_slab(self, lease: Lease, claimant: Lease) -> bool:
        """Move one slab, if sequences must be preempted for it. False if nothing helps."""
        assert lease.user is not None
        is_senior = self._policy.senior() is lease
        while (slab := self._policy.cheapest(lease, claimant)) is None:
            if not lease.user.preempt_youngest(keep_oldest=is_senior):
                return False
        claimant.num_short -= self._move(slab, claimant)
        return True

    def _move(self, slab: int, to: Lease | Reservation | None) -> int:
        """Hand over a slab, emptied, and return how many blocks that brings."""
        slabs = self._map
        with self._lock:
            owner = slabs.owners[slab]
            if isinstance(owner, Lease):
                owner.lose(slab)
            if owner is not None:
                self._clear(slab)
            slabs.recalled.pop(slab, None)
            slabs.owners[slab] = to
            return to.gain(slab) if isinstance(to, Lease) else 0

    def _set_limits(self) -> None:
        lendable = set(range(self.num_slabs)) - self._map.reserved
        for lease in self._map.leases:
            lease.max_blocks = lease.grid.num_blocks(lendable)
