"""What routers tell the store of accounts' limits, and what they get of it: a part of each limit that is lent to one router.

What is used and what is lent come to no more than the limit. Refuses to know where that is kept (postgres_leases.py).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

EXPIRES_S = 10.0  # a lease that its router does not confirm


class LeaseKey(NamedTuple):
    account: str
    limit: str  # as the configuration names it
    period: int = 0  # the day, of a limit that is for one


class LeaseClaim(NamedTuple):
    """A router's use of a limit since it told last, and its wish for more."""

    key: LeaseKey
    capacity: float  # the limit, as this router's file has it
    per_s: float  # that leaks away
    before: float  # used before anything was written here
    spent: float  # since it told last
    at_work: float  # that comes back
    spare: float  # wanted beyond what is at work


class LeaseGrant(NamedTuple):
    held: float  # this router's part from now on: at least what is at work
    free: float  # that nobody holds; below zero where more is used than there is


class LeaseStore(Protocol):
    def exchange(self, router: str, claims: Sequence[LeaseClaim]) -> list[LeaseGrant]:
        """Take all claims down, or none. Raises UsageStoreError."""

    def interrupt(self) -> None:
        """Let what another thread waits for fail."""

    def close(self) -> None: ...


def granted(claim: LeaseClaim, used: float, held_by_others: float) -> LeaseGrant:
    free = claim.capacity - used - held_by_others
    held = max(claim.at_work, min(claim.at_work + claim.spare, free))
    return LeaseGrant(held, free - held)
