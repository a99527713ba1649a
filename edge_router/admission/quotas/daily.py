"""Daily quotas of accounts, by UTC: tokens, or cost at the configured prices.

A request reserves its possible maximum (the estimated prompt and its maximum output) and is settled with its actual usage. So a quota is exceeded
only by open answers without a maximum and by errors of the estimates. Each router counts from its own ledger; several routers each grant the whole
quota, unless they share it (shared.py).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pilotlight.edge_router.admission.quotas.lease_store import LeaseKey
from pilotlight.edge_router.admission.quotas.shared import QuotaLease, SharedQuotas
from pilotlight.edge_router.metering.ledger.prices import BILLIONTHS
from pilotlight.sites.network import CustomerConfig
from pilotlight.wire.errors import ApiError

DAY_S = 86_400
DAYS_KEPT = 3  # days whose usage stays in memory, so that it is still known after a clock jumps to another day and back


class Reserved(NamedTuple):
    account: str
    day: int
    tokens: int
    cost: int
    shared: tuple["DayPart", ...] = ()


class DayPart(NamedTuple):
    """A part of a lease that a request has reserved, in tokens or money."""

    lease: QuotaLease
    amount: int
    is_money: bool


class DayUse:
    """One day of an account: usage of ended requests, and reservations."""

    __slots__ = ("cost", "tokens")

    def __init__(self) -> None:
        self.tokens = self.cost = 0


class DailyQuotas:
    def __init__(self, clock: Callable[[], float], shared: SharedQuotas | None = None) -> None:
        """Count by days of `clock`, which returns seconds since the epoch."""
        self._clock = clock
        self._shared = shared
        self._before: dict[str, DayUse] = {}  # usage of accounts today, before this router started
        self._limits: dict[str, CustomerConfig] = {}
        self._day = self._began = self._today()
        self._used: dict[str, DayUse] = {}
        self._days = {self._day: self._used}

    def set(self, accounts: Iterable[CustomerConfig]) -> None:
        """Replace the quotas, for example after the file was read again."""
        self._limits = {
            account.name: account
            for account in accounts
            if account.tokens_per_day is not None or account.cost_per_day is not None
        }

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def day_began_s(self) -> float:
        return float(self._day * DAY_S)

    def begin_with(self, account: str, tokens: int, cost: int) -> None:
        """Count usage of an account today, before this router started."""
        for known in (self._used, self._before):
            use = known.setdefault(account, DayUse())
            use.tokens += tokens
            use.cost += cost

    def recovered(self, account: str, started_s: float, tokens: int, cost: int) -> None:
        """Report to other routers the usage of a request that was open when this router was killed.
        This router's own count has it already, from the ledger."""
        if started_s >= self.day_began_s:
            self._spend(self._parts(account, self._day, 0, 0), tokens, cost)

    def count(self, account: str, started_s: float, tokens: int, cost: int) -> None:
        """Count usage of an account without a reservation."""
        self._keep_to_today()
        use = self._days.get(int(started_s // DAY_S), {}).setdefault(account, DayUse())
        use.tokens += tokens
        use.cost += cost
        self.recovered(account, started_s, tokens, cost)

    async def ready(self, account: str, tokens: int, cost: int) -> None:
        """Wait until the shared limits allow `reserve` to grant this amount.
        Raises ApiError if too little is left."""
        if self._shared is None:
            return
        self._keep_to_today()
        parts = self._parts(account, self._day, tokens, cost)
        short = await self._shared.short([(part.lease, part.amount) for part in parts])
        for part in parts:
            if part.lease is short:
                scale, form = (BILLIONTHS, ".6g") if part.is_money else (1, ",.0f")
                used, limit = (short.capacity - short.free - short.held) / scale, short.capacity / scale
                what = f"{limit:g} of money" if part.is_money else f"{limit:,.0f} tokens"
                raise self._refusal(account, what, f"{max(0.0, used):{form}}", f"{part.amount / scale:{form}}")

    def reserve(self, account: str, tokens: int, cost: int) -> Reserved:
        """Return a reservation for a request.
        Accounts without a quota are counted too, because one may be set during the day. Raises ApiError if too little is left."""
        limits = self._limits.get(account)
        self._keep_to_today()
        use = self._used.setdefault(account, DayUse())
        if limits is not None and limits.tokens_per_day is not None and use.tokens + tokens > limits.tokens_per_day:
            raise self._refusal(account, f"{limits.tokens_per_day:,} tokens", f"{use.tokens:,}", f"{tokens:,}")
        if (
            limits is not None
            and limits.cost_per_day is not None
            and use.cost + cost > limits.cost_per_day * BILLIONTHS
        ):
            used, more = use.cost / BILLIONTHS, cost / BILLIONTHS
            raise self._refusal(account, f"{limits.cost_per_day:g} of money", f"{used:.6g}", f"{more:.6g}")
        use.tokens += tokens
        use.cost += cost
        parts = self._parts(account, self._day, tokens, cost)
        for part in parts:
            part.lease.begin(part.amount)
        return Reserved(account, self._day, tokens, cost, parts)

    def settle(self, reserved: Reserved | None, tokens: int, cost: int) -> None:
        """Replace a reservation by the actual usage, on the day of the reservation."""
        if reserved is None:
            return
        for part in reserved.shared:
            part.lease.end(part.amount)
        self._spend(reserved.shared, tokens, cost)
        use = self._days.get(reserved.day, {}).get(reserved.account)
        if use is not None:
            use.tokens += tokens - reserved.tokens
            use.cost += cost - reserved.cost

    def _parts(self, account: str, day: int, tokens: int, cost: int) -> tuple[DayPart, ...]:
        """Return what a request needs of each daily limit that routers share; empty if its account has none."""
        limits = self._limits.get(account)
        if self._shared is None or limits is None:
            return ()
        parts, before = [], self._before.get(account, DayUse()) if day == self._began else DayUse()
        if limits.tokens_per_day is not None:
            key = LeaseKey(account, "tokens_per_day", day)
            parts.append(DayPart(self._shared.lease(key, limits.tokens_per_day, 0, before.tokens), tokens, False))
        if limits.cost_per_day is not None:
            key, most = LeaseKey(account, "cost_per_day", day), limits.cost_per_day * BILLIONTHS
            parts.append(DayPart(self._shared.lease(key, most, 0, before.cost), cost, True))
        return tuple(parts)

    def _spend(self, parts: Iterable[DayPart], tokens: int, cost: int) -> None:
        for lease, _, is_money in parts:
            assert self._shared is not None, "its parts are there"
            # A lease without open requests may have been returned and created again.
            self._shared.lease(lease.key, lease.capacity, 0, lease.before).spend(cost if is_money else tokens)

    def _keep_to_today(self) -> None:
        """Begin to count for another day when the clock shows one."""
        if (today := self._today()) == self._day:
            return
        self._day, self._used = today, self._days.setdefault(today, {})
        if len(self._days) > DAYS_KEPT:
            del self._days[min(day for day in self._days if day != today)]

    def _today(self) -> int:
        return int(self._clock() // DAY_S)

    def _refusal(self, account: str, limit: str, used: str, more: str) -> ApiError:
        left_s = (self._day + 1) * DAY_S - self._clock()
        sentence = (
            f"the account {account} may have {limit} a day (UTC): {used} are used or reserved, and this request may take {more}; "
            f"lower max_tokens, or try again in {left_s:.0f} s"
        )
        return ApiError("quota_exceeded", sentence, retry_after_s=left_s)
