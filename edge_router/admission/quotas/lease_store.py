"""Messages between routers and the store of accounts' limits.

A router reports its use and gets a lease, a part of each limit.

Usage and leases together never exceed a limit. The store is postgres_leases.py.
"""

from typing import NamedTuple

EXPIRES_S = 10.0  # a lease without a confirmation ends after this time


class LeaseKey(NamedTuple):
    account: str
    limit: str  # the limit's name in the configuration
    period: int = 0  # day number of a daily limit, otherwise 0


class LeaseClaim(NamedTuple):
    """A router's use of a limit since its last report, and the amount that it wants."""

    key: LeaseKey
    capacity: float  # the limit in this router's file
    per_s: float  # units per second by which usage decays
    before: float  # usage before the store knew the limit
    spent: float  # usage since the last report
    at_work: float  # amount that open requests hold and will return
    spare: float  # amount wanted in addition to `at_work`


class LeaseGrant(NamedTuple):
    held: float  # this router's part of the limit from now on: at least the claim's `at_work`
    free: float  # the part of the limit that no router has leased; negative if more is used than the limit allows


def granted(claim: LeaseClaim, used: float, held_by_others: float) -> LeaseGrant:
    free = claim.capacity - used - held_by_others
    held = max(claim.at_work, min(claim.at_work + claim.spare, free))
    return LeaseGrant(held, free - held)
