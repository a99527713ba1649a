"""Messages between routers and the store of accounts' limits.

A router reports its use and gets a lease, a part of each limit.

Usage and leases together never exceed a limit. The store is postgres_leases.py.
"""

from typing import NamedTuple

EXPIRES_S = 10.0  # a lease without a confirmation ends after this time


class LeaseKey(NamedTuple):
    account: str
    limit: str  # as the configuration names it
    period: int = 0  # the day, of a limit that is for one


class LeaseClaim(NamedTuple):
    """A router's use of a limit since its last report, and the amount that it wants."""

    key: LeaseKey
    capacity: float  # the limit, as this router's file has it
    per_s: float  # rate at which use leaks away
    before: float  # used before anything was written here
    spent: float  # since the last report
    at_work: float  # open requests, which give it back
    spare: float  # wanted in addition to open requests


class LeaseGrant(NamedTuple):
    held: float  # this router's part from now on: at least that of its open requests
    free: float  # the part without a lease; negative if more is used than the limit allows


def granted(claim: LeaseClaim, used: float, held_by_others: float) -> LeaseGrant:
    free = claim.capacity - used - held_by_others
    held = max(claim.at_work, min(claim.at_work + claim.spare, free))
    return LeaseGrant(held, free - held)
