"""This router's leases of accounts' limits.

All routers of a network enforce these limits together (`[quotas] store`).

A router admits requests against its lease and reports usage to the store; when the lease is too small, a request waits for the store's next answer. A
lease is LEASE_SHARE of its limit beyond open requests, and an unused one is returned. So accounts exceed a limit only by the unreported use of a
killed router, and for GIVEN_BACK_S they may not get the unused leases of other routers. If an answer of the store is lost, a lease may count twice.
Without its store a router admits requests by its own counts or, if configured to refuse, by its lease until the store lets it expire.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from pilotlight.edge_router.admission.quotas.lease_store import EXPIRES_S, LeaseClaim, LeaseGrant, LeaseKey
from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError, configured
from pilotlight.sites.network import QuotasConfig
from pilotlight.support.time_limits import done_within
from pilotlight.wire.errors import ApiError

if TYPE_CHECKING:
    # imported here, because psycopg may be missing
    from pilotlight.edge_router.admission.quotas.postgres_leases import PostgresLeases

LEASE_SHARE = 1 / 16
TICK_S = 0.25
TOLD_EVERY_S = 1.0  # how often usage is reported
CONFIRMED_EVERY_S = EXPIRES_S / 4
GIVEN_BACK_S = 2.0  # an unused lease is returned this long after its last use
ASKED_AGAIN_S = 0.1  # pause before another claim of a limit that is used up
ANSWERS_WITHIN_S = 1.0  # longest wait for the store's answer; then the request continues without it
TRY_AGAIN_S = 1.0

log = logging.getLogger("pilotlight.quotas")


class QuotaLease:
    """This router's part of one limit of an account."""

    __slots__ = (
        "at_work", "before", "capacity", "empty_until", "free", "held", "key", "per_s", "seen_at", "spent", "used_at", "wanted",
    )  # fmt: skip

    def __init__(self, key: LeaseKey, capacity: float, per_s: float, before: float, now: float) -> None:
        self.key = key
        self.capacity, self.per_s, self.before = capacity, per_s, before
        self.held = self.free = 0.0
        self.at_work = 0.0  # amount that open requests and reservations hold and will return
        self.spent = 0.0  # amount spent since the last report
        self.wanted = 0.0  # amount that waiting requests need
        self.seen_at = float("-inf")  # when the last confirmed claim was made
        self.used_at = now
        self.empty_until = float("-inf")

    @property
    def size(self) -> float:
        return max(1.0, self.capacity * LEASE_SHARE)

    def room(self, now: float) -> float:
        return self.held - self.at_work - self.spent if now < self.seen_at + EXPIRES_S else 0.0

    def spend(self, amount: float) -> None:
        self.spent += amount

    def begin(self, amount: float) -> None:
        self.at_work += amount

    def end(self, amount: float) -> None:
        self.at_work -= amount

    def wait_s(self, need: float, now: float) -> float:
        """Return the seconds until `need` may be available if no other request takes it."""
        return max(0.0, need - self.room(now) - self.free) / self.per_s if self.per_s else 1.0

    def is_due(self, now: float) -> bool:
        """Tell whether the store should get a report."""
        room, is_used = self.room(now), self._is_used(now)
        is_large = room > 2 * self.size if is_used else self.held > self.at_work
        is_small = is_used and room < self.size / 2 and now >= self.empty_until
        if self.wanted or is_large or is_small:
            return True
        wait_s = TOLD_EVERY_S if self.spent else CONFIRMED_EVERY_S if self.held or self.at_work else float("inf")
        return now >= self.seen_at + wait_s

    def claim(self, now: float) -> LeaseClaim:
        spare = self.wanted + (self.size if self.wanted or self._is_used(now) else 0.0)
        return LeaseClaim(self.key, self.capacity, self.per_s, self.before, self.spent, self.at_work, spare)

    def answered(self, claim: LeaseClaim, grant: LeaseGrant, now: float) -> None:
        """Apply the store's answer to a claim that was made at `now`."""
        self.held, self.free = grant.held, grant.free
        self.spent -= claim.spent
        self.seen_at = now
        if grant.free <= 0:
            self.empty_until = now + ASKED_AGAIN_S

    def is_gone(self, now: float) -> bool:
        return not (self.held or self.at_work or self.spent or self._is_used(now))

    def _is_used(self, now: float) -> bool:
        return now < self.used_at + GIVEN_BACK_S


class SharedQuotas:
    """This router's leases. Run `run()` as a task, and `close()` after it."""

    def __init__(
        self,
        store: "PostgresLeases",
        *,
        serves_without: bool,
        clock: Callable[[], float] = time.monotonic,
        answers_within_s: float = ANSWERS_WITHIN_S,
    ) -> None:
        """`serves_without` admits requests by this router's own counts while the store fails."""
        self.fault: str | None = None  # why the store cannot be used
        self._store = store
        self._serves_without = serves_without
        self._clock = clock
        self._answers_within_s = answers_within_s
        self._router = os.urandom(8).hex()
        self._leases: dict[LeaseKey, QuotaLease] = {}
        self._waited_for: set[QuotaLease] = set()
        self._looked_at = float("-inf")
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()  # set and replaced with each answer
        self._thread = ThreadPoolExecutor(1, "quotas")

    def __len__(self) -> int:
        return len(self._leases)

    def lease(self, key: LeaseKey, capacity: float, per_s: float = 0.0, before: float = 0.0) -> QuotaLease:
        """Return this router's lease of a limit of `capacity`.
        `before` is the usage before the store knew the limit."""
        found = self._leases.get(key)
        if found is None:
            found = self._leases[key] = QuotaLease(key, capacity, per_s, before, self._clock())
        found.capacity, found.per_s = capacity, per_s
        return found

    async def short(self, needs: Sequence[tuple[QuotaLease, float]]) -> QuotaLease | None:
        """Wait until the leases have room for `needs`; return the first one whose limit is used up, or None.

        Raises ApiError if the store does not answer and the configuration refuses requests then.
        """
        until = self._clock() + self._answers_within_s
        while True:
            now = self._clock()
            short = [(lease, need) for lease, need in needs if lease.room(now) < need]
            for lease, _ in needs:
                lease.used_at = now
            if not short:
                return None
            if self.fault is not None or now >= until:
                if self._serves_without:
                    return None
                sentence = "limits of accounts cannot be checked right now: try again later"
                raise ApiError("overloaded", sentence, retry_after_s=2)
            if (used_up := next((lease for lease, _ in short if now < lease.empty_until), None)) is not None:
                return used_up
            await self._next_answer(short, until - now)

    async def _next_answer(self, short: Sequence[tuple[QuotaLease, float]], within_s: float) -> None:
        for lease, need in short:
            lease.wanted += need
            self._waited_for.add(lease)
        self._wake.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._answered.wait()
        finally:
            for lease, need in short:
                lease.wanted -= need
                if not lease.wanted:
                    self._waited_for.discard(lease)

    async def run(self) -> None:
        while True:
            if self.fault is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
            else:
                await asyncio.sleep(TRY_AGAIN_S)
            self._wake.clear()
            await self.report()

    async def report(self) -> None:
        """Report the leases that are due, if any; while the store fails, try it even so."""
        due = self._due(self._clock())
        if due or self.fault is not None:
            await self._exchange(due)

    def _due(self, now: float) -> list[QuotaLease]:
        """Return the leases that requests wait for; every TICK_S return all leases that need a report instead."""
        if now < self._looked_at + TICK_S:
            return [*self._waited_for]
        self._looked_at = now
        for lease in [lease for lease in self._leases.values() if lease.is_gone(now)]:
            del self._leases[lease.key]
        return [lease for lease in self._leases.values() if lease.is_due(now)]

    async def close(self) -> None:
        """Return all leases, if the store answers."""
        for lease in self._leases.values():
            lease.used_at = float("-inf")
        if self._leases and self.fault is None:
            await self._exchange([*self._leases.values()])
        self._thread.shutdown()
        self._store.close()

    async def _exchange(self, leases: Sequence[QuotaLease]) -> None:
        now = self._clock()
        claims = [lease.claim(now) for lease in leases]
        try:
            grants = await self._answer(claims)
        except UsageStoreError as error:
            self._failed(str(error))
        else:
            if self.fault is not None:
                log.warning("limits of accounts are shared with other routers again")
            self.fault = None
            for lease, claim, grant in zip(leases, claims, grants, strict=True):
                lease.answered(claim, grant, now)
        self._tell_waiting()

    async def _answer(self, claims: Sequence[LeaseClaim]) -> list[LeaseGrant]:
        """Return the store's answer; interrupt the store if it takes too long. Raises UsageStoreError."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._store.exchange, self._router, claims)
        if not await done_within(self._answers_within_s, work):
            self._failed(f"no answer within {self._answers_within_s:g} s")
            self._tell_waiting()
            self._store.interrupt()
        return await work

    def _failed(self, why: str) -> None:
        if self.fault is None:
            without = "by this router's own counts" if self._serves_without else "by this router's leases"
            log.error("limits of accounts are enforced %s until their store answers: %s", without, why)
        self.fault = why

    def _tell_waiting(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()


def shared_quotas(config: QuotasConfig, clock: Callable[[], float]) -> SharedQuotas | None:
    """Return the shared limits; None if no store is configured. Raises ConfigError."""
    if config.store is None:
        return None
    store = configured("quotas.store", partial(_postgres, config.store))
    return SharedQuotas(store, serves_without=config.when_failing == "serve", clock=clock)


def _postgres(url: str) -> "PostgresLeases":
    from pilotlight.edge_router.admission.quotas.postgres_leases import PostgresLeases

    return PostgresLeases(url)
