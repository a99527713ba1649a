"""Admission of requests by key, address and tenant, before their body is read.

It limits how much of the router one tenant or one client address may use.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pilotlight.edge_router.admission.quotas.lease_store import LeaseKey
from pilotlight.edge_router.admission.quotas.shared import QuotaLease, SharedQuotas
from pilotlight.edge_router.requests.request import Head, speaks_for_an_account
from pilotlight.edge_router.requests.session import tenant_salt
from pilotlight.sites.network import CustomerConfig, DoorConfig, TenantLimitsConfig
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import ApiError, RateQuota
from pilotlight.wire.hop.headers import ACCOUNT, HOP

MODEL_LISTS = ("/v1/models", "/ai/v1/models")
EXPECTED_TOKENS = 256  # assumed for an answer without a limit in its request
MAX_TENANTS = 100_000  # tenants in memory; one that was idle for a minute has full limits again and can be dropped

LIMITS = {
    "requests_per_min": "requests per minute",
    "tokens_per_min": "tokens per minute",
    "max_open": "requests in progress",
}

_PLAIN_TARGET = re.compile(r"[\x21-\x7e]+")


class AdmissionFilter:
    def __init__(self, access: Access, limits: "TenantLimits", secret: str) -> None:
        """`secret` is the network's shared secret; it verifies hops from other routers and sites."""
        self.access = access
        self.limits = limits
        self._secret = secret
        self.is_draining = False

    async def admit(self, head: Head, address: str) -> "OpenRequest":
        """Return a context for the duration of a request. Raises ApiError if it is not admitted."""
        if self.is_draining:
            raise ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1)
        self.identify(head)
        if head.path in MODEL_LISTS and head.method not in ("GET", "HEAD", "OPTIONS"):
            raise ApiError("method_not_allowed", f"{head.path[:200]} does not take {head.method}: GET lists the models")
        if ".." in head.path and ".." in head.path.split("/"):
            raise ApiError("not_found", "a path must not contain '..'")
        if not _PLAIN_TARGET.fullmatch(head.target):
            raise ApiError("invalid_request", "a path must be printable ASCII: encode everything else as %XX")
        await self.limits.ready(head)
        return self.limits.admitted(head, address)

    def identify(self, head: Head) -> None:
        """Set the account of a request. Raises ApiError if its key is missing or lacks the scope."""
        if head.is_for_function:  # the function checks keys itself; a known key has its usual limits
            head.hold(self.access.find(head.key))
        elif self._secret and head.has(HOP) and speaks_for_an_account(head, self._secret):
            head.hold(self.access.of_account(head.header(ACCOUNT)))
        else:
            head.hold(self.access.holder(head.header("authorization")))


class Bucket:
    """A token bucket: it fills at a rate per minute, and holds at most the tokens of one minute."""

    __slots__ = ("_at", "_level", "per_min")

    def __init__(self, per_min: float, now: float) -> None:
        self.per_min = per_min
        self._level = per_min
        self._at = now

    def wait_s(self, now: float, amount: float = 1.0) -> float:
        """Return the seconds until the bucket holds `amount`, at most until it is full; 0 if it holds it now."""
        return max(0.0, min(amount, self.per_min) - self._filled(now)) * 60 / self.per_min

    def take(self, amount: float, now: float) -> None:
        self._level = self._filled(now) - amount

    def changed(self, per_min: float, now: float) -> "Bucket":
        """Return a bucket of another size from which as much has been taken as from this one."""
        bucket = Bucket(per_min, now)
        bucket.take(self.per_min - self._filled(now), now)
        return bucket

    def _filled(self, now: float) -> float:
        self._level = min(self.per_min, self._level + max(0.0, now - self._at) * self.per_min / 60)
        self._at = max(self._at, now)
        return self._level


class ReservedTokens(NamedTuple):
    """Tokens that a request has reserved from its tenant's limit per minute."""

    tenant: "_TenantUse"
    tokens: float
    shared: QuotaLease | None


class _TenantUse:
    __slots__ = ("account", "limits", "open", "requests", "tokens")

    def __init__(self, account: str | None, limits: TenantLimitsConfig, now: float) -> None:
        self.account = account
        self.open = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.hold_to(limits, now)

    def hold_to(self, limits: TenantLimitsConfig, now: float) -> None:
        """Apply new limits from now on. Usage of the current minute still counts."""
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_min, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_min, now)

    def draw(self, now: float) -> None:
        """Charge one request to the limits. Raises ApiError if a limit is used up."""
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now)):
                sentence = (
                    f"your account is limited to {bucket.per_min:g} {what} per minute: try again in {wait_s:.0f} s"
                )
                raise _refusal(sentence, wait_s, RateQuota(what, bucket.per_min))
        if self.requests is not None:
            self.requests.take(1, now)


def _resized(bucket: Bucket | None, per_min: float | None, now: float) -> Bucket | None:
    if per_min is None:
        return None
    return Bucket(per_min, now) if bucket is None else bucket.changed(per_min, now)


class OpenRequest:
    """A scope in which one open request of a tenant and of an address counts. `close` ends it early."""

    __slots__ = ("_client", "_clients", "_is_open", "_shared", "_tenant")

    def __init__(self, tenant: _TenantUse, clients: dict[str, int], client: str, shared: QuotaLease | None) -> None:
        self._tenant = tenant
        self._clients, self._client = clients, client
        self._shared = shared
        self._is_open = False

    def __enter__(self) -> "OpenRequest":
        self._is_open = True
        self._tenant.open += 1
        if self._shared is not None:
            self._shared.begin(1)
        self._clients[self._client] = self._clients.get(self._client, 0) + 1
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._tenant.open -= 1
        if self._shared is not None:
            self._shared.end(1)
        clients, client = self._clients, self._client
        if clients[client] > 1:
            clients[client] -= 1
        else:
            del clients[client]


class TenantLimits:
    def __init__(
        self,
        door: DoorConfig,
        default: TenantLimitsConfig,
        accounts: tuple[CustomerConfig, ...],
        secret: str,
        clock: Callable[[], float],
        shared: SharedQuotas | None = None,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        """Limit clients; `shared` are the limits common to the network's routers."""
        self.shared = shared
        self._max_tenants = max_tenants
        self._secret = secret
        self._clock = clock
        self._clients: dict[str, int] = {}
        self._tenants: OrderedDict[bytes, _TenantUse] = OrderedDict()  # the least recently used first
        self.set(door, default, accounts)

    def set(self, door: DoorConfig, default: TenantLimitsConfig, accounts: tuple[CustomerConfig, ...]) -> None:
        """Apply new limits from now on.
        Requests in progress and usage of the current minute count against them."""
        self._door = door
        self._default = default
        self._named = {account.name: account for account in accounts}
        self.counts_tokens = any(limits.tokens_per_min is not None for limits in (default, *accounts))
        self.restricts_models = any(account.models is not None for account in accounts)
        for tenant in self._tenants.values():
            tenant.hold_to(self._limits_of(tenant.account), self._clock())

    @property
    def num_open(self) -> int:
        return sum(self._clients.values())

    async def ready(self, head: Head) -> None:
        """Wait until this router's leases of the shared limits have room for one more request of an account.
        Raises ApiError if a limit is used up."""
        if self.shared is None:
            return
        needs = [(lease, 1.0) for name in LIMITS if (lease := self._lease(head, name)) is not None]
        if (short := await self.shared.short(needs)) is None:
            return
        what, wait_s = LIMITS[short.key.limit], short.wait_s(1.0, self._clock())
        sentence = f"your account is limited to {short.capacity:g} {what}, at all routers: try again in {wait_s:.0f} s"
        rate = None if short.key.limit == "max_open" else RateQuota(short.key.limit.partition("_")[0], short.capacity)
        raise _refusal(sentence, wait_s, rate)

    def admitted(self, head: Head, client: str) -> OpenRequest:
        """Return a context for one admitted request. Raises ApiError with a retry time if a limit is reached."""
        tenant = self._tenant(head)
        limits = tenant.limits
        if self._clients.get(client, 0) >= self._door.max_open_per_client:
            raise _refusal(
                f"your address has {self._door.max_open_per_client} requests in progress: wait for some of them", 1.0
            )
        if limits.max_open is not None and tenant.open >= limits.max_open:
            raise _refusal(f"your account has {limits.max_open} requests in progress: wait for some of them", 1.0)
        if tenant.requests is not None or tenant.tokens is not None:
            tenant.draw(self._clock())
        if (lease := self._lease(head, "requests_per_min")) is not None:
            lease.spend(1)
        return OpenRequest(tenant, self._clients, client, self._lease(head, "max_open"))

    def held(self, head: Head, client: str) -> OpenRequest:
        """Return a context in which a request counts as open after its admission has ended."""
        return OpenRequest(self._tenant(head), self._clients, client, self._lease(head, "max_open"))

    async def reserve(self, head: Head, tokens: int, *, may_refuse: bool = True) -> ReservedTokens | None:
        """Reserve the most tokens that a request may use; return None if nothing limits it.
        Batch requests are not charged to the per-minute budget. Raises ApiError if too few are left."""
        if head.is_for_batch or not tokens:
            return None
        tenant = self._tenant(head)
        if (bucket := tenant.tokens) is None:
            return None
        need, shared = min(tokens, bucket.per_min), self._lease(head, "tokens_per_min")
        needs = [(shared, need)] if shared is not None and may_refuse else []
        if self.shared is not None and (short := await self.shared.short(needs)) is not None:
            raise _too_many_tokens(bucket.per_min, need, short.wait_s(need, self._clock()))
        now = self._clock()
        if may_refuse and (wait_s := bucket.wait_s(now, need)):
            raise _too_many_tokens(bucket.per_min, need, wait_s)
        bucket.take(need, now)
        if shared is not None:
            shared.begin(need)
        return ReservedTokens(tenant, need, shared)

    def settle(self, reserved: ReservedTokens | None, tokens: int) -> None:
        """Replace a request's reservation by its actual tokens."""
        if reserved is None:
            return
        if (bucket := reserved.tenant.tokens) is not None:
            bucket.take(tokens - reserved.tokens, self._clock())
        if reserved.shared is not None:
            reserved.shared.end(reserved.tokens)
            reserved.shared.spend(tokens)

    def _lease(self, head: Head, limit: str) -> QuotaLease | None:
        """Return this router's lease of an account's limit; None without a limit or without shared limits."""
        if self.shared is None or head.holder is None:
            return None
        account = head.holder.account.name
        most: float | None = getattr(self._limits_of(account), limit)
        if most is None:
            return None
        return self.shared.lease(LeaseKey(account, limit), most, 0.0 if limit == "max_open" else most / 60)

    def _tenant(self, head: Head) -> _TenantUse:
        # without the account id of a path: a client could invent ids, and each would get a new bucket
        key = tenant_salt(head.owner, "", self._secret)
        tenant = self._tenants.get(key)
        if tenant is None:
            account = None if head.holder is None else head.holder.account.name
            tenant = self._tenants[key] = _TenantUse(account, self._limits_of(account), self._clock())
            self._forget()
        else:
            self._tenants.move_to_end(key)
        return tenant

    def _forget(self) -> None:
        """Evict the least recently used tenants; keep those with open requests."""
        for _ in range(min(8, len(self._tenants) - self._max_tenants)):
            key, tenant = self._tenants.popitem(last=False)
            if tenant.open:
                self._tenants[key] = tenant

    def _limits_of(self, account: str | None) -> TenantLimitsConfig:
        return self._default if account is None else self._named.get(account, self._default)


def _too_many_tokens(per_min: float, need: float, wait_s: float) -> ApiError:
    sentence = (
        f"your account is limited to {per_min:g} tokens per minute; fewer are left than the {need:g} that this request and its answer may use: "
        f"lower max_tokens, or try again in {wait_s:.0f} s"
    )
    return _refusal(sentence, wait_s)


def _refusal(sentence: str, wait_s: float, rate: RateQuota | None = None) -> ApiError:
    return ApiError("quota_exceeded", sentence, retry_after_s=min(60.0, wait_s), rate_limit=rate)
