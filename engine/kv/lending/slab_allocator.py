"""Gives a model its part of the arena when it is opened: a lease, by which models borrow slabs from each other, or a reservation, a run of its own.

How slabs move from then on is lease.py's; and who has which.
"""

from collections.abc import Callable

from pilotlight.engine.kv.lending.lease import Lease, Reservation, SlabMap, SlabPolicy
from pilotlight.engine.kv.lending.slabs import SlabGrid


class NoSlabsError(Exception):
    """The arena has no room for another model."""


class SlabAllocator:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """`clear` zeroes a slab; free slabs hold zeros."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self._map = SlabMap(num_slabs, slab_bytes, clear)
        self._policy = SlabPolicy(self._map)

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
        with self._map.lock:
            longest = max((len(run) for run in self._map.unreserved_runs()), default=0)
            return min(longest, self._map.num_lendable - bool(self._map.leases))

    def open(self, name: str, block_bytes: int, copies: int = 1) -> Lease:
        """Let a model borrow. `copies`: ranks that have blocks of their own in each slab. Raises NoSlabsError."""
        grid = SlabGrid(self.num_slabs, self.slab_bytes, block_bytes, copies)
        with self._map.lock:
            if self._map.num_lendable == 0:
                raise NoSlabsError("nothing of it is left to borrow")
            if not grid.fits:
                raise NoSlabsError(
                    f"one block takes {block_bytes} bytes, more than half of a slab ({self.slab_bytes} bytes)"
                )
            lease = Lease(self._map, self._policy, name, grid)
            self._map.leases.append(lease)
            self._map.set_limits()
        return lease

    def reserve(self, name: str, num_slabs: int) -> Reservation:
        """Give a model a run of slabs of its own. Raises NoSlabsError."""
        slabs = self._map
        with slabs.lock:
            if num_slabs > self.largest_run:
                raise NoSlabsError(f"{num_slabs} slabs side by side are wanted, {self.largest_run} can be had")
            reservation = Reservation(slabs, name, self._policy.place_for(num_slabs))
            for slab in reservation.slabs:
                slabs.reserved.add(slab)
                if slabs.owners[slab] is None:
                    slabs.owners[slab] = reservation
                else:
                    slabs.recalled[slab] = reservation
            slabs.set_limits()
        return reservation

    def assert_consistent(self) -> None:
        self._map.assert_consistent()
