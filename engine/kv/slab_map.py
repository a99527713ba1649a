"""Who has each slab of the arena: a model that borrows it, a reservation, or nobody."""

from collections.abc import Iterable

from engine.kv.lease import Lease, Reservation


class SlabMap:
    """Facts only: slab_policy.py chooses by them, slab_allocator.py changes them."""

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.owners: list[Lease | Reservation | None] = [None] * num_slabs
        self.recalled: dict[int, Reservation] = {}  # slabs that their owner must leave for a reservation
        self.reserved: set[int] = set()  # these, and those that reservations have
        self.leases: list[Lease] = []

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

    def assert_consistent(self) -> None:
        for slab, owner in enumerate(self.owners):
            assert (slab in self.reserved) == (isinstance(owner, Reservation) or slab in self.recalled)
            assert all((slab in lease.slabs) == (owner is lease) for lease in self.leases)
            assert slab not in self.recalled or isinstance(owner, Lease)
        for lease in self.leases:
            lease.pool.assert_consistent()
            assert lease.pool.num_blocks == lease.grid.num_blocks(lease.slabs)
