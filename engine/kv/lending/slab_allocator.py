"""The allocation of a model's part of the arena: a lease on shared slabs, or a reserved run of slabs.

lease.py records the owners of slabs, and moves slabs later. `find_place` chooses between lease and reservation.
"""

from collections.abc import Callable

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.kv.lending.lease import Lease, Reservation, SlabMap, SlabPolicy
from pilotlight.engine.kv.lending.slabs import SlabGrid
from pilotlight.engine.kv.pool.layout import CacheLayout


class NoSlabsError(Exception):
    """The arena has no memory for another model."""


class SlabAllocator:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """Make an allocator of free, zeroed slabs. `clear`: function that zeroes a slab that changes owners."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self._map = SlabMap(num_slabs, slab_bytes, clear)
        self._policy = SlabPolicy(self._map)

    @property
    def num_free(self) -> int:
        return len(self._map.free_slabs())

    @property
    def num_lendable(self) -> int:
        """The number of slabs that are not reserved."""
        return self._map.num_lendable

    @property
    def largest_run(self) -> int:
        """The length of the longest run that can be reserved; if models borrow, one slab must remain for them."""
        with self._map.lock:
            longest = max((len(run) for run in self._map.unreserved_runs()), default=0)
            return min(longest, self._map.num_lendable - bool(self._map.leases))

    def open(self, name: str, block_bytes: int, copies: int = 1) -> Lease:
        """Open a model's lease. `copies`: number of ranks with separate blocks. Raises NoSlabsError."""
        grid = SlabGrid(self.num_slabs, self.slab_bytes, block_bytes, copies)
        with self._map.lock:
            if self._map.num_lendable == 0:
                raise NoSlabsError("no slab is left to borrow")
            if not grid.fits:
                raise NoSlabsError(
                    f"one block takes {block_bytes} bytes, more than half of a slab ({self.slab_bytes} bytes)"
                )
            lease = Lease(self._map, self._policy, name, grid)
            self._map.leases.append(lease)
            self._map.set_limits()
        return lease

    def reserve(self, name: str, num_slabs: int) -> Reservation:
        """Reserve a run of slabs for a model. Raises NoSlabsError."""
        slabs = self._map
        with slabs.lock:
            if num_slabs > self.largest_run:
                raise NoSlabsError(f"{num_slabs} contiguous slabs are needed, {self.largest_run} are available")
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


def find_place(
    spec: ModelSpec, layout: CacheLayout, slabs: SlabAllocator, arena_bytes: int, copies: int = 1
) -> Lease | Reservation:
    """Return the model's place in the arena. Raises CheckpointError if there is no room.

    `arena_bytes`: size of the arena, for the error message. `copies`: number of ranks with separate sequences, which all get the same place.
    """
    try:
        if spec.kv_tokens is None:
            return slabs.open(spec.name, layout.block_bytes, copies)
        wanted = num_reserved_blocks(spec, layout) * layout.block_bytes
        available = slabs.largest_run * slabs.slab_bytes
        if not 0 < wanted <= available:
            raise CheckpointError(
                f"{spec.name} asks for {spec.kv_tokens} tokens of KV cache, {wanted} bytes; "
                f"the arena can give {available} in one piece, and {layout.description}: lower kv_tokens or raise kv_gib"
            )
        return slabs.reserve(spec.name, -(-wanted // slabs.slab_bytes))
    except NoSlabsError as error:
        raise CheckpointError(
            f"the KV arena of {arena_bytes} bytes has no room for {spec.name}: {error}; {layout.description}; "
            "give the host more KV memory (kv_gib), lower block_size, or change the models' own shares (kv_tokens)"
        ) from error


def num_reserved_blocks(spec: ModelSpec, layout: CacheLayout) -> int:
    """Return how many blocks `kv_tokens` tokens need on each rank, rounded up."""
    return len(layout.groups) * -(-(spec.kv_tokens or 0) // layout.block_size)
