"""The choice of the sequence to admit next, fair between tenants and without starved priorities.

**Between tenants** of one priority: deficit round robin (Shreedhar and Varghese, 1995) over uncached prompt tokens. A tenant's turn is worth one
quantum; it pays after service (as in surplus round robin: Adiseshu, Parulkar and Varghese, 1996), because only the admission itself knows how much of
a prompt was cached. Debts outlast an empty queue as long as others wait. So, with q the quantum and c the costliest prompt:

- a tenant that arrives waits, before its first admission, for at most q + c tokens of each other tenant;
- two tenants that always have waiting sequences never differ by more than q + c tokens served.

**Between priorities**: the smaller number goes first, strictly; but a priority with waiting sequences gets at least one of every
`AGEING_ADMISSIONS` + (priorities waiting - 1) admissions, the one passed over longest first.

**Within a tenant and a priority**: by arrival. A preempted sequence is older than those that have not started, so it goes first; it was paid for
already.

All of it costs O(1) amortised: a visit to a tenant that is not served hands out a quantum that pays for a later one. This module is independent of
blocks, steps and clocks.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pilotlight.engine.core.sequence import Sequence

AGEING_ADMISSIONS = 16
# Limit of admissions per turn. Places in the batch are scarce as well: a tenant whose prompts are all cached (one token each) would otherwise be
# admitted 2,048 times in a turn.
ADMISSIONS_PER_TURN = 8
# Tenants without waiting sequences are kept while they are in debt. If there are more than this number plus twice the waiting tenants, those that
# have paid their debts are removed.
_KEPT_DEBTS = 64


class FairQueue:
    """The sequences that wait to be admitted."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._classes: dict[int, _PriorityClass] = {}  # those with waiting sequences, by priority
        self._num_sequences = 0
        self._num_admissions = 0
        self.num_tokens = 0  # tokens of all waiting sequences

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for group in self._classes.values() for sequence in group)

    def owners(self) -> set[tuple[int, bytes]]:
        """Return the owners of all waiting sequences."""
        return {(priority, tenant.name) for priority, group in self._classes.items() for tenant in group.tenants}

    def add(self, sequence: Sequence) -> None:
        group = self._classes.get(sequence.priority)
        if group is None:
            group = self._classes[sequence.priority] = _PriorityClass(self._quantum, self._num_admissions)
        group.add(sequence)
        self._num_sequences += 1
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended before its turn."""
        self._classes[sequence.priority].remove(sequence)
        self._forget(sequence)

    def peek(self) -> Sequence:
        """Return the next sequence to admit. The result changes only if a more urgent sequence arrives."""
        return self._next_class().peek()

    def pop(self, num_uncached_tokens: int) -> Sequence:
        """Admit the next sequence; charge its tenant unless the sequence was admitted, and paid for, earlier."""
        group = self._next_class()
        sequence = group.peek()
        is_new = sequence.num_cached_tokens is None
        group.pop(max(num_uncached_tokens, self._quantum // ADMISSIONS_PER_TURN) if is_new else 0)
        self._num_admissions += 1
        group.last_admission = self._num_admissions
        self._forget(sequence)
        return sequence

    def _next_class(self) -> "_PriorityClass":
        overdue = [
            group
            for group in self._classes.values()
            if self._num_admissions - group.last_admission >= AGEING_ADMISSIONS
        ]
        if overdue:
            return min(overdue, key=lambda group: group.last_admission)
        return self._classes[min(self._classes)]

    def _forget(self, sequence: Sequence) -> None:
        self._num_sequences -= 1
        self.num_tokens -= len(sequence.token_ids)
        if self._classes[sequence.priority].is_empty:
            del self._classes[sequence.priority]


@dataclass(eq=False, slots=True)
class _TenantQueue:
    name: bytes
    round: int  # the round in which the tenant last got a quantum
    deficit: int = 0  # tokens that the tenant may still have; negative for a debt
    queue: deque[Sequence] = field(default_factory=deque)  # by arrival


class _PriorityClass:
    """The tenants of one priority, taking turns."""

    def __init__(self, quantum: int, last_admission: int) -> None:
        self.last_admission = last_admission  # number of admissions of the queue at the class's last admission, or when the class was made
        self._quantum = quantum
        self._round = 0
        self._ring: deque[_TenantQueue] = deque()  # tenants with waiting sequences; the first one has the turn
        self._tenants: dict[bytes, _TenantQueue] = {}  # tenants in the ring, and those in debt
        self._started: _TenantQueue | None = None  # the first tenant of the ring, if its turn has started

    @property
    def is_empty(self) -> bool:
        return not self._ring

    @property
    def tenants(self) -> Iterable[_TenantQueue]:
        """Return the tenants with waiting sequences."""
        return self._ring

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for tenant in self._ring for sequence in tenant.queue)

    def add(self, sequence: Sequence) -> None:
        tenant = self._tenants.get(sequence.tenant)
        if tenant is None:
            tenant = self._tenants[sequence.tenant] = _TenantQueue(sequence.tenant, self._round - 1)
        if not tenant.queue:
            self._ring.append(tenant)
        _insert_by_arrival(tenant.queue, sequence)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.tenant]
        tenant.queue.remove(sequence)
        self._leave_if_empty(tenant)

    def peek(self) -> Sequence:
        while True:
            tenant = self._ring[0]
            if tenant is not self._started:
                self._begin_turn(tenant)
            if tenant.deficit > 0:
                return tenant.queue[0]
            self._ring.rotate(-1)
            self._started = None

    def pop(self, cost: int) -> None:
        """Remove the sequence that `peek` returned."""
        tenant = self._ring[0]
        tenant.queue.popleft()
        tenant.deficit -= cost
        self._leave_if_empty(tenant)

    def _begin_turn(self, tenant: _TenantQueue) -> None:
        if tenant.round == self._round:  # every tenant has had a turn in this round
            self._round += 1
        # One quantum for each round; the rounds that a tenant missed pay its debt and give no credit.
        tenant.deficit = min(self._quantum, tenant.deficit + (self._round - tenant.round) * self._quantum)
        tenant.round = self._round
        self._started = tenant

    def _leave_if_empty(self, tenant: _TenantQueue) -> None:
        if tenant.queue:
            return
        self._ring.remove(tenant)
        if self._started is tenant:
            self._started = None
        if tenant.deficit >= 0:
            del self._tenants[tenant.name]
        elif len(self._tenants) > 2 * len(self._ring) + _KEPT_DEBTS:
            self._tenants = {name: t for name, t in self._tenants.items() if t.queue or not self._is_paid(t)}

    def _is_paid(self, tenant: _TenantQueue) -> bool:
        return tenant.deficit + (self._round - tenant.round) * self._quantum >= 0


def _insert_by_arrival(queue: deque[Sequence], sequence: Sequence) -> None:
    """Insert a sequence: new ones at the end, preempted ones and parallel samples nearly always in front."""
    if not queue or queue[-1].arrival < sequence.arrival:
        queue.append(sequence)
        return
    place = next(i for i, other in enumerate(queue) if other.arrival > sequence.arrival)
    queue.insert(place, sequence)
