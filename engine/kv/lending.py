"""Who has which slab of the arena: several models borrow, give way and claim their share.

A model that needs a block takes, in this order: one of its own free ones, a free slab, an unheld slab of an *idle* model (the one unused for
longest first), an unheld slab of a busy model that has more than its fair share while this one has less, and only then its own cached blocks. When
all of those are held by sequences, it *claims*: from a model above its share while it is below its own; or, when its oldest sequence is the oldest
of the whole host and runs alone, from anybody. The other gives way at its next schedule, by preempting its youngest sequences. So every model has
its share when it has work, and the oldest sequence of the host always advances, be it as long as the arena: every sequence ends.

A reservation is a run of slabs that one model has for itself from its load to its unload. Knows slab numbers and counts; refuses to know
tensors, tokens and time. Models are opened and closed by the loader's thread, everything else happens in the host's: hence the lock.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from threading import RLock
from typing import NamedTuple, Protocol

from engine.kv.block_pool import BlockPool
from engine.kv.slabs import SlabGrid


class NoSlabsError(Exception):
    """The arena has no room for another model."""


class Oldest(NamedTuple):
    """A model's oldest running sequence, or the one that is next to run when none does."""

    arrival: int
    blocks: Sequence[int]  # that it holds
    num_missing: int  # blocks until all its tokens have a place


class Work(Protocol):
    """What lending knows of a model's scheduler."""

    @property
    def has_work(self) -> bool: ...

    @property
    def is_alone(self) -> bool:
        """Nothing runs beside the oldest sequence."""

    def oldest(self) -> Oldest | None: ...

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        """False if there is none to preempt."""

    def preempt_holders(self, blocks: range) -> None: ...


class Prospects(NamedTuple):
    free_blocks: int
    total_blocks: int


class Account:
    """One model's dealings with the arena."""

    def __init__(self, lending: "Lending", name: str, grid: SlabGrid) -> None:
        self.name = name
        self.grid = grid
        self.slabs: set[int] = set()
        self.max_blocks = 0  # it could ever have: in all slabs that are not reserved
        self.work: Work | None = None
        self.num_short = 0  # blocks that it lacked when it last scheduled
        self.last_used = 0
        self.is_refused = False  # nobody lends before the next schedule
        self._lending = lending
        self.pool = BlockPool(0, grid.capacity)

    @property
    def arrivals(self) -> "count[int]":
        """Numbers sequences across all models."""
        return self._lending.arrivals

    @property
    def is_busy(self) -> bool:
        return self.work is not None and self.work.has_work

    def new_pool(self) -> BlockPool:
        """For a new scheduler: every slab is given back, whatever was in it."""
        self._lending.reclaim(self)
        self.pool = BlockPool(0, self.grid.capacity)
        self.pool.borrow = lambda: self._lending.lend(self)
        return self.pool

    def begin(self) -> None:
        """A schedule begins: what others are due is handed over first."""
        self._lending.begin(self)

    def claim(self, num_blocks: int) -> bool:
        """So many blocks are missing. True if another model gives way at its next schedule: it is worth waiting for."""
        self.num_short += num_blocks
        return self._lending.debtor(self) is not None

    def prospects(self) -> Prospects:
        """What a new sequence could take, and what this model could have as things are."""
        total = self._lending.num_within_reach(self)
        return Prospects(total - self.pool.num_held, total)

    def close(self) -> None:
        self._lending.close(self)

    def unheld(self, without: Collection[int] = ()) -> list[int]:
        """Slabs that could go at once."""
        return [s for s in self.slabs if s not in without and not self.pool.is_held(self.grid.touching(s))]

    def gain(self, slab: int) -> int:
        blocks = self.grid.brought_by(slab, self.slabs)
        self.slabs.add(slab)
        self.pool.add_blocks(blocks)
        return len(blocks)

    def lose(self, slab: int) -> None:
        self.slabs.remove(slab)
        self.pool.remove_blocks(self.grid.touching(slab))


class Reservation:
    """A run of slabs that is one model's own."""

    def __init__(self, lending: "Lending", name: str, slabs: range) -> None:
        self.name = name
        self.slabs = slabs
        self._lending = lending

    def is_complete(self) -> bool:
        """Whoever had one of the slabs has left it. Unheld ones are taken by asking."""
        return self._lending.collect(self)

    def close(self) -> None:
        self._lending.end(self)


class Lending:
    def __init__(self, num_slabs: int, slab_bytes: int, clear: Callable[[int], None]) -> None:
        """`clear` zeroes a slab; free slabs hold zeros."""
        self.num_slabs = num_slabs
        self.slab_bytes = slab_bytes
        self.arrivals = count()
        self._clear = clear
        self._owners: list[Account | Reservation | None] = [None] * num_slabs
        self._called: dict[int, Reservation] = {}  # slabs that their owner must leave for a reservation
        self._reserved: set[int] = set()  # these, and those that reservations have
        self._accounts: list[Account] = []
        self._clock = count(1)
        self._lock = RLock()

    @property
    def num_free(self) -> int:
        return self._owners.count(None)

    @property
    def num_lendable(self) -> int:
        return self.num_slabs - len(self._reserved)

    @property
    def largest_run(self) -> int:
        """Slabs side by side that a reservation could have. One is left where models borrow."""
        with self._lock:
            longest = max((len(run) for run in self._unreserved_runs()), default=0)
            return min(longest, self.num_lendable - bool(self._accounts))

    def open(self, name: str, block_bytes: int) -> Account:
        grid = SlabGrid(self.num_slabs, self.slab_bytes, block_bytes)
        with self._lock:
            if self.num_lendable == 0:
                raise NoSlabsError("nothing of it is left to borrow")
            if not grid.fits:
                raise NoSlabsError(
                    f"one block takes {block_bytes} bytes, more than half of a slab ({self.slab_bytes} bytes)"
                )
            account = Account(self, name, grid)
            self._accounts.append(account)
            self._set_limits()
        return account

    def reserve(self, name: str, num_slabs: int) -> Reservation:
        """The run that disturbs others least, as far up as possible: models borrow from below."""
        with self._lock:
            if num_slabs > self.largest_run:
                raise NoSlabsError(f"{num_slabs} slabs side by side are wanted, {self.largest_run} can be had")
            starts = [i for run in self._unreserved_runs() for i in range(run.start, run.stop - num_slabs + 1)]
            first = min(starts, key=lambda i: (num_slabs - self._owners[i : i + num_slabs].count(None), -i))
            reservation = Reservation(self, name, range(first, first + num_slabs))
            for slab in reservation.slabs:
                self._reserved.add(slab)
                if self._owners[slab] is None:
                    self._owners[slab] = reservation
                else:
                    self._called[slab] = reservation
            self._set_limits()
        return reservation

    def close(self, account: Account) -> None:
        with self._lock:
            self.reclaim(account)
            self._accounts.remove(account)

    def end(self, reservation: Reservation) -> None:
        with self._lock:
            for slab in reservation.slabs:
                self._reserved.remove(slab)
                if self._called.pop(slab, None) is None:
                    self._move(slab, None)
            self._set_limits()

    def collect(self, reservation: Reservation) -> bool:
        with self._lock:
            for slab in [slab for slab, caller in self._called.items() if caller is reservation]:
                owner = self._owners[slab]
                assert isinstance(owner, Account), "only what a model borrows is called back"
                if not owner.pool.is_held(owner.grid.touching(slab)):
                    self._move(slab, reservation)
            return reservation not in self._called.values()

    def reclaim(self, account: Account) -> None:
        """Every slab of the model is free, or goes to the reservation that waits for it; its blocks are worth nothing."""
        with self._lock:
            account.pool = BlockPool(0, account.grid.capacity)
            for slab in list(account.slabs):
                self._move(slab, self._called.get(slab))

    def begin(self, account: Account) -> None:
        account.is_refused = False
        account.last_used = next(self._clock)
        account.num_short = 0
        if not self._called and len(self._accounts) < 2:
            return
        with self._lock:
            for slab in sorted(account.slabs & self._called.keys()):
                assert account.work is not None
                account.work.preempt_holders(account.grid.touching(slab))
                if not account.pool.is_held(account.grid.touching(slab)):  # else by a copy under way: next time
                    self._move(slab, self._called[slab])
            while (claimant := self._claimant_on(account)) is not None and self._give_way(account, claimant):
                pass

    def lend(self, account: Account) -> bool:
        """One more slab without disturbing any sequence; False if there is none."""
        if account.is_refused:
            return False
        with self._lock:
            slab = self._slab_for(account)
            if slab is None:
                account.is_refused = True
                return False
            self._move(slab, account)
            return True

    def debtor(self, claimant: Account) -> Account | None:
        """Who must give way for a model that found nothing to borrow."""
        with self._lock:
            others = [a for a in self._busy() if a is not claimant and a.slabs - self._called.keys()]
            share = self._share(claimant)
            if len(claimant.slabs) < share:
                above = [a for a in others if len(a.slabs) > share and self._can_yield(a)]
                if above:
                    return max(above, key=lambda a: len(a.slabs))
            if others and claimant.work is not None and claimant.work.is_alone and self._senior() is claimant:
                return max(others, key=lambda a: len(a.slabs))
            return None

    def num_within_reach(self, account: Account) -> int:
        """Blocks that the model could have now: its own, what it could borrow, and what would be its share at least."""
        if not any(other.slabs for other in self._accounts if other is not account):
            return max(account.max_blocks, account.pool.num_blocks)
        with self._lock:
            share = self._share(account)
            reach = account.slabs | set(self._free_slabs())
            for other in self._accounts:
                if other is not account:
                    unheld = other.unheld(self._called)
                    reach.update(unheld if not other.is_busy else unheld[: max(0, len(other.slabs) - share)])
            claimable = max(0, share - len(reach)) * (self.slab_bytes // account.grid.block_bytes)
            return max(min(account.grid.num_blocks(reach) + claimable, account.max_blocks), account.pool.num_blocks)

    def assert_consistent(self) -> None:
        for slab, owner in enumerate(self._owners):
            assert (slab in self._reserved) == (isinstance(owner, Reservation) or slab in self._called)
            assert all((slab in account.slabs) == (owner is account) for account in self._accounts)
            assert slab not in self._called or isinstance(owner, Account)
        for account in self._accounts:
            account.pool.assert_consistent()
            assert account.pool.num_blocks == account.grid.num_blocks(account.slabs)

    def _share(self, account: Account) -> int:
        """Slabs that each model with work has a right to."""
        return self.num_lendable // len({account, *self._busy()})

    def _busy(self) -> list[Account]:
        return [account for account in self._accounts if account.is_busy]

    def _senior(self) -> Account | None:
        """The model with the oldest sequence."""
        oldest = [
            (oldest.arrival, account)
            for account in self._busy()
            if account.work is not None and (oldest := account.work.oldest()) is not None
        ]
        return min(oldest, key=lambda pair: pair[0])[1] if oldest else None

    def _pinned(self, account: Account) -> tuple[set[int], int]:
        """Slabs of the senior model in which its oldest sequence lies, and how many more it will need."""
        oldest = account.work.oldest() if account.work is not None and self._senior() is account else None
        if oldest is None:
            return set(), 0
        per_slab = max(1, self.slab_bytes // account.grid.block_bytes - 1)
        return account.grid.slabs_of(oldest.blocks), -(-oldest.num_missing // per_slab)

    def _can_yield(self, account: Account) -> bool:
        pinned, needed = self._pinned(account)
        return len(account.slabs - pinned - self._called.keys()) > needed

    def _slab_for(self, account: Account) -> int | None:
        if free := self._free_slabs():
            return min(free, key=lambda slab: (-len(account.grid.brought_by(slab, account.slabs)), slab))
        others = [a for a in self._accounts if a is not account and a.slabs]
        for other in sorted((a for a in others if not a.is_busy), key=lambda a: a.last_used):
            if (slab := self._cheapest(other, account)) is not None:
                return slab
        share = self._share(account)
        if len(account.slabs) < share:
            for other in sorted((a for a in others if a.is_busy), key=lambda a: -len(a.slabs)):
                if len(other.slabs) > share and self._can_yield(other):
                    slab = self._cheapest(other, account)
                    if slab is not None:
                        return slab
        return None

    def _cheapest(self, owner: Account, borrower: Account) -> int | None:
        """Of the owner's slabs that nobody holds, the one with the least cached; of equals the one that brings most."""
        slabs = owner.unheld(self._called)

        def cost(slab: int) -> tuple[int, int, int]:
            cached = owner.pool.num_cached(owner.grid.touching(slab))
            return cached, -len(borrower.grid.brought_by(slab, borrower.slabs)), slab

        return min(slabs, key=cost) if slabs else None

    def _claimant_on(self, account: Account) -> Account | None:
        claimants = [a for a in self._busy() if a.num_short > 0 and self.debtor(a) is account]
        return min(claimants, key=lambda a: len(a.slabs)) if claimants else None

    def _give_way(self, account: Account, claimant: Account) -> bool:
        """One slab changes hands, if sequences must be preempted for it. False if nothing helps."""
        assert account.work is not None
        is_senior = self._senior() is account
        while (slab := self._cheapest(account, claimant)) is None:
            if not account.work.preempt_youngest(keep_oldest=is_senior):
                return False
        claimant.num_short -= self._move(slab, claimant)
        return True

    def _move(self, slab: int, to: Account | Reservation | None) -> int:
        """The slab changes hands, emptied. How many blocks that brings."""
        with self._lock:
            owner = self._owners[slab]
            if isinstance(owner, Account):
                owner.lose(slab)
            if owner is not None:
                self._clear(slab)
            self._called.pop(slab, None)
            self._owners[slab] = to
            return to.gain(slab) if isinstance(to, Account) else 0

    def _free_slabs(self) -> list[int]:
        return [slab for slab, owner in enumerate(self._owners) if owner is None]

    def _set_limits(self) -> None:
        lendable = set(range(self.num_slabs)) - self._reserved
        for account in self._accounts:
            account.max_blocks = account.grid.num_blocks(lendable)

    def _unreserved_runs(self) -> Iterable[range]:
        start = 0
        for end in [*sorted(self._reserved), self.num_slabs]:
            if end > start:
                yield range(start, end)
            start = end + 1
