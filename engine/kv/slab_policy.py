"""Which model must give up which slab when another one lacks blocks.

A model that needs a block takes, in this order: one of its own free ones, a free slab, an unheld slab of an *idle* model (the one unused for
longest first), an unheld slab of a busy model that has more than its fair share while this one has less, and only then its own cached blocks. When
all of those are held by sequences, it *reclaims*: from a model above its share while it is below its own; or, when its oldest sequence is the oldest
of the whole host and runs alone, from any. The borrower yields at its next schedule, by preempting its youngest sequences. So every model has its
share when it has work, and the oldest sequence of the host always advances, be it as long as the arena: every sequence ends.

Reads the map of slabs (slab_map.py); moves nothing (lease.py).
"""

from engine.kv.lease import Lease
from engine.kv.slab_map import SlabMap


class SlabPolicy:
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
