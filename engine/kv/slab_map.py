"""Who has each slab of the arena: a model that borrows it, a reservation, or nobody; and how a slab changes hands.

Knows slab numbers and counts; refuses to know tensors, tokens and time. Which slab goes is slab_policy.py's choice, and when, lease.py's.
"""

from collections.abc import Callable, Iterable
from itertools import count
from threading import RLock

from engine.kv.lease import Lease, Reservation


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
