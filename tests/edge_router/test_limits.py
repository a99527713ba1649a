"""Limits of tenants and addresses: buckets that refill with time, counts that are returned, and refusals with the time to retry."""

import asyncio
import hashlib
from contextlib import ExitStack, nullcontext, suppress
from typing import cast

import msgspec
import pytest

from pilotlight.edge_router.admission.filter import LIMITS, MAX_TENANTS, AdmissionFilter, Bucket, TenantLimits
from pilotlight.edge_router.admission.quotas.lease_store import LeaseKey
from pilotlight.edge_router.admission.quotas.shared import QuotaLease, SharedQuotas
from pilotlight.edge_router.requests.request import Head
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.network import CustomerConfig, DoorConfig, NetworkConfig, TenantLimitsConfig
from pilotlight.wire.credentials import Access, Account, Key
from pilotlight.wire.errors import ApiError
from tests.edge_router.builders import Clock, network
from tests.edge_router.fakes import answer, event, raw_stream, router, sites

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}


def head(key: str, path: str = "/v1/chat/completions") -> Head:
    return Head("POST", path, path, [("authorization", f"Bearer {key}")])


def limits(
    clock: Clock,
    *accounts: CustomerConfig,
    max_open_per_client: int = 100,
    max_tenants: int = MAX_TENANTS,
    **default: float,
) -> TenantLimits:
    door = DoorConfig(max_open_per_client=max_open_per_client)
    return TenantLimits(door, TenantLimitsConfig(**default), accounts, "secret", clock, max_tenants=max_tenants)


def ask(door: TenantLimits, key: str, client: str = "1.2.3.4", path: str = "/v1/chat/completions") -> None:
    with door.admitted(head(key, path), client):
        pass


def test_a_bucket_holds_a_minutes_worth_and_fills_with_time() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait_s(0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1.0) == 0
    assert Bucket(60, 0.0).wait_s(1e9) == 0


def test_a_quiet_hour_saves_up_no_more_than_a_minutes_worth() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 3600.0)
    assert bucket.wait_s(3600.0) == pytest.approx(1.0)


def test_a_clock_that_jumps_back_gives_nothing_and_takes_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0)
    assert bucket.wait_s(101.0) == 0


def test_requests_beyond_the_minutes_worth_learn_when_to_come_back() -> None:
    clock = Clock()
    door = limits(clock, requests_per_min=2)
    ask(door, "alice")
    ask(door, "alice")
    with pytest.raises(ApiError, match="2 requests per minute") as refused:
        ask(door, "alice")
    assert refused.value.word == "quota_exceeded"
    assert refused.value.headers()[0] == ("retry-after", "30")
    assert refused.value.rate_limit == ("requests", 2)
    ask(door, "bob")  # another tenant has its own bucket
    clock.advance(30)
    ask(door, "alice")


@pytest.mark.parametrize("spelled", ["bearer alice", "BEARER   alice", "Bearer alice "])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/client/v4/accounts/other/ai/run/m", "/fn/hello/"])
async def test_an_accounts_keys_have_one_bucket_whatever_the_spelling_and_the_path(spelled: str, path: str) -> None:
    door = limits(Clock(), CustomerConfig(name="acme", requests_per_min=1), requests_per_min=100)
    known = [Key(name, hashlib.sha256(name.encode()).hexdigest(), account=Account("acme")) for name in ("alice", "al")]
    admission = AdmissionFilter(Access(known, is_required=False), door, "")
    with await admission.admit(head("al"), "1.2.3.4"):
        pass
    with pytest.raises(ApiError, match="1 requests per minute"):
        await admission.admit(Head("POST", path, path, [("authorization", spelled)]), "1.2.3.4")


@pytest.mark.parametrize(
    ("method", "path", "target", "word"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions?a=%20", ""),
        *((method, "/v1/models", "/v1/models", "") for method in ("GET", "HEAD", "OPTIONS")),
        ("POST", "/v1/models", "/v1/models", "method_not_allowed"),
        ("DELETE", "/ai/v1/models", "/ai/v1/models", "method_not_allowed"),
        ("POST", "/v1/models/x", "/v1/models/x", ""),
        ("GET", "/v1/../admin", "/v1/../admin", "not_found"),
        ("GET", "/v1/a/..", "/v1/a/%2e%2e", "not_found"),
        ("GET", "/v1/..a/b..", "/v1/..a/b..", ""),
        ("GET", "/v1/a b", "/v1/a b", "invalid_request"),
        ("GET", "/v1/\xe9", "/v1/\xe9", "invalid_request"),
        ("GET", "/v1/\x7f", "/v1/\x7f", "invalid_request"),
        ("GET", "/v1/a", "/v1/a\r\nx-pilotlight-account: b", "invalid_request"),
        ("GET", "/v1/a", "/v1/a\n", "invalid_request"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_its_head_and_counts_nowhere(
    method: str, path: str, target: str, word: str
) -> None:
    door = limits(Clock(), requests_per_min=1)
    admission = AdmissionFilter(Access([], is_required=False), door, "")
    asked = Head(method, path, target, [])
    if word:
        with pytest.raises(ApiError) as refused:
            await admission.admit(asked, "1.2.3.4")
        assert refused.value.word == word
    else:
        with await admission.admit(asked, "1.2.3.4"):
            assert door.num_open == 1
    assert door.num_open == 0
    with nullcontext() if word else pytest.raises(ApiError, match="1 requests"):
        door.admitted(Head("GET", "/v1/models", "/v1/models", []), "1.2.3.4")
    admission.is_draining = True
    with pytest.raises(ApiError) as refused:
        await admission.admit(asked, "1.2.3.4")
    assert (refused.value.word, refused.value.retry_after_s) == ("draining", 1)


def test_accounts_without_a_key_share_the_bucket_of_those_who_have_none() -> None:
    door = limits(Clock(), requests_per_min=1)
    for i, refused in enumerate((False, True)):
        path = f"/client/v4/accounts/a{i}/ai/run/m"
        with pytest.raises(ApiError) if refused else nullcontext(), door.admitted(Head("POST", path, path, []), "a"):
            pass


@pytest.mark.parametrize("path", ["/v1/models", "/fn/f/"])
def test_credentials_that_are_no_key_share_the_bucket_of_those_who_have_none(path: str) -> None:
    door = limits(Clock(), requests_per_min=1)
    with door.admitted(Head("GET", path, path, []), "a"):
        pass
    basic = [("authorization", "Basic dXNlcjo=")]
    with pytest.raises(ApiError, match="1 requests per minute"), door.admitted(Head("GET", path, path, basic), "a"):
        pass


async def test_tokens_that_a_request_may_come_to_are_reserved_and_what_it_came_to_is_settled() -> None:
    clock = Clock()
    door = limits(clock, tokens_per_min=100)
    first = await door.reserve(head("alice"), 60)
    with pytest.raises(
        ApiError, match="fewer are left than the 60 that this request and its answer may use"
    ) as refused:
        await door.reserve(head("alice"), 60)
    assert refused.value.retry_after_s == pytest.approx(12.0)
    assert await door.reserve(head("bob"), 60) is not None
    door.settle(first, 20)
    second = await door.reserve(head("alice"), 60)
    door.settle(second, 60)
    clock.advance(60)
    whole = await door.reserve(head("alice"), 1_000_000)
    assert whole is not None
    assert whole.tokens == 100, "a request reserves a minute's tokens at most"
    assert await door.reserve(head("alice"), 0) is None
    assert await limits(clock).reserve(head("alice"), 60) is None


async def test_an_answer_longer_than_it_was_taken_to_be_leaves_a_debt_that_is_waited_for() -> None:
    clock = Clock()
    door = limits(clock, tokens_per_min=100)
    ask(door, "alice")
    door.settle(await door.reserve(head("alice"), 50), 220)
    with pytest.raises(ApiError, match="100 tokens per minute") as refused:
        ask(door, "alice")
    assert refused.value.retry_after_s == 60.0  # at most a minute, although the debt is larger
    clock.advance(73)
    ask(door, "alice")


def test_requests_at_work_are_counted_per_tenant_and_per_address() -> None:
    door = limits(Clock(), max_open_per_client=3, max_open=2)
    with door.admitted(head("alice"), "a"), door.admitted(head("alice"), "b"):
        with pytest.raises(ApiError, match="your account has 2 requests"):
            ask(door, "alice", "c")
        with (
            door.admitted(head("bob"), "a"),
            door.admitted(head("carol"), "a"),
            pytest.raises(ApiError, match="your address"),
        ):
            ask(door, "dora", "a")
    ask(door, "alice")
    assert door.num_open == 0


def test_a_request_that_is_closed_early_counts_until_then_and_once() -> None:
    door = limits(Clock())
    with door.admitted(head("a"), "1.2.3.4") as early, door.held(head("a"), "1.2.3.4"):
        assert door.num_open == 2
        early.close()
        early.close()
        assert door.num_open == 1
    assert door.num_open == 0


def test_one_address_is_a_small_part_of_what_a_router_takes_unless_the_file_says_otherwise() -> None:
    door = DoorConfig()
    assert door.max_connections_per_client == door.max_open_per_client <= door.max_connections / 50
    full = limits(Clock(), max_open_per_client=door.max_open_per_client)
    with ExitStack() as stack:
        for _ in range(door.max_open_per_client):
            stack.enter_context(full.admitted(head("alice"), "a"))
        with pytest.raises(ApiError, match="your address has 256 requests in progress"):
            ask(full, "alice", "a")
        ask(full, "alice", "b")


def test_a_tenant_of_the_file_has_its_own_limits() -> None:
    clock = Clock()
    door = limits(clock, CustomerConfig(name="alice", requests_per_min=5), requests_per_min=1)
    alice = head("alice")
    alice.hold(Key("alice", "", account=Account("alice")))
    for _ in range(5):
        with door.admitted(alice, "1.2.3.4"):
            pass
    ask(door, "bob")
    for each in (alice, head("bob")):
        with pytest.raises(ApiError), door.admitted(each, "1.2.3.4"):
            pass


def test_new_limits_count_usage_within_the_minute_and_open_requests() -> None:
    clock = Clock()
    door = limits(clock, requests_per_min=4, max_open=1)
    ask(door, "alice")
    for per_min, more in ((4, 3), (6, 2), (2, 0)):
        door.set(DoorConfig(), TenantLimitsConfig(requests_per_min=per_min, max_open=1), ())
        for _ in range(more):
            ask(door, "alice")
        with pytest.raises(ApiError, match="per minute"):
            ask(door, "alice")
    ask(door, "bob")
    clock.advance(600)
    with door.admitted(head("bob"), "1.2.3.4"):
        door.set(DoorConfig(), TenantLimitsConfig(requests_per_min=None, max_open=1), ())
        with pytest.raises(ApiError, match="has 1 requests in progress"):
            ask(door, "bob")
        ask(door, "alice")
    ask(door, "bob")


def test_the_table_of_tenants_is_bounded_and_keeps_all_with_open_requests() -> None:
    door = limits(Clock(), max_open=1, requests_per_min=1, max_tenants=10)

    def num_known(name: str) -> int:
        """Return for how many of the latest tenants it is known that they have used their limit."""
        for i in reversed(range(100)):
            with suppress(ApiError):
                ask(door, f"{name}{i}")
                return 99 - i
        return 100

    with door.admitted(head("alice"), "a"):
        for i in range(100):
            ask(door, f"t{i}")
        assert 1 <= num_known("t") <= 12
        with pytest.raises(ApiError, match="has 1 requests in progress"):
            ask(door, "alice")
    for i in range(100):
        ask(door, f"u{i}")
    assert 1 <= num_known("u") <= 10


def test_an_unknown_key_in_a_tenants_table_names_the_nearest() -> None:
    base = msgspec.to_builtins(network({"ams1": "http://x:1"}))
    with pytest.raises(ConfigError, match="did you mean 'requests_per_min'"):
        parse(NetworkConfig, {**base, "tenant_limits": {"request_per_min": 1}}, "file")


class Shared:
    """Fake leases of limits that routers share; all suffice, except one if `too_little` is set."""

    def __init__(self) -> None:
        self.leases: dict[LeaseKey, QuotaLease] = {}
        self.too_little: str | None = None
        self.needs: list[float] = []

    def lease(self, key: LeaseKey, capacity: float, per_s: float = 0.0, before: float = 0.0) -> QuotaLease:
        return self.leases.setdefault(key, QuotaLease(key, capacity, per_s, before, 0.0))

    async def short(self, needs: list[tuple[QuotaLease, float]]) -> QuotaLease | None:
        self.needs += [need for _, need in needs]
        return next((lease for lease, _ in needs if lease.key.limit == self.too_little), None)


async def test_what_routers_share_of_an_accounts_limits_counts_beside_this_routers_own() -> None:
    shared, clock = Shared(), Clock()
    accounts = (
        CustomerConfig(name="acme", requests_per_min=60, tokens_per_min=600, max_open=2),
        CustomerConfig(name="free", requests_per_min=30),
    )
    door = TenantLimits(DoorConfig(), TenantLimitsConfig(max_open=1), accounts, "s", clock, cast(SharedQuotas, shared))
    heads = {name: head(name) for name in ("acme", "free", "stranger")}
    for name in ("acme", "free"):
        heads[name].hold(Key(name, "", account=Account(name)))
    for each in heads.values():
        await door.ready(each)
    assert {key: (lease.capacity, lease.per_s) for key, lease in shared.leases.items()} == {
        LeaseKey("acme", "requests_per_min"): (60, 1.0),
        LeaseKey("acme", "tokens_per_min"): (600, 10.0),
        LeaseKey("acme", "max_open"): (2, 0.0),
        LeaseKey("free", "requests_per_min"): (30, 0.5),
    }
    requests, tokens, at_work = (shared.leases[LeaseKey("acme", limit)] for limit in LIMITS)
    with door.admitted(heads["acme"], "a"), door.held(heads["acme"], "a"), door.admitted(heads["stranger"], "a"):
        assert (requests.spent, requests.at_work, at_work.spent, at_work.at_work) == (1, 0, 0, 2)
        assert door.num_open == 3
    assert (requests.spent, at_work.at_work, door.num_open) == (1, 0, 0)
    assert shared.needs == [1.0] * 4
    reserved = [
        await door.reserve(heads[name], amount) for name, amount in (("acme", 30), ("free", 9), ("stranger", 9))
    ]
    assert (tokens.spent, tokens.at_work, shared.needs[4:], reserved[1:]) == (0, 30, [30], [None, None])
    door.settle(reserved[0], 7)
    assert (tokens.spent, tokens.at_work, requests.spent) == (7, 0, 1)
    shared.too_little = "tokens_per_min"
    with pytest.raises(ApiError, match="600 tokens per minute"):
        await door.reserve(heads["acme"], 30)
    heads["acme"].is_for_batch = True
    assert await door.reserve(heads["acme"], 100) is None
    for limit, says in (("requests_per_min", "60 requests per minute"), ("max_open", "2 requests in progress")):
        shared.too_little = limit
        with pytest.raises(
            ApiError, match=f"your account is limited to {says}, at all routers: try again in 1 s"
        ) as refused:
            await door.ready(heads["acme"])
        assert (refused.value.word, refused.value.retry_after_s) == ("quota_exceeded", 1.0)
        assert refused.value.rate_limit == (None if limit == "max_open" else ("requests", 60))
        await door.ready(heads["stranger"])


def test_one_request_of_an_address_is_taken_where_one_may_be_at_work() -> None:
    door = limits(Clock(), max_open_per_client=1)
    with door.admitted(head("alice"), "a"), pytest.raises(ApiError, match="your address has 1 requests in progress"):
        ask(door, "bob", "a")
    ask(door, "bob", "a")


@pytest.mark.process
async def test_a_tenant_beyond_its_requests_gets_429_with_the_time_and_others_are_served() -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"tenant_limits": {"requests_per_min": 1}}) as running:
        statuses = []
        for headers in (ALICE, ALICE, BOB):
            async with running.chat(headers=headers) as response:
                statuses.append(response.status)
                if response.status == 429:
                    told = {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}
                    assert told.keys() == {f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")}
                    assert told["x-ratelimit-reset-requests"] == response.headers["retry-after"] + "s"
                    assert 0 < int(response.headers["retry-after"]) <= 60
                    assert (await response.json())["error"]["code"] == "quota_exceeded"
        assert statuses == [200, 429, 200]


@pytest.mark.process
async def test_answers_are_charged_by_their_marks_and_by_their_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with sites("ams1") as fakes, router(fakes, tables={"tenant_limits": {"tokens_per_min": 1000}}) as running:
        fakes[0].behave = answer(200, {"usage": {"prompt_tokens": 1, "completion_tokens": 2000}})
        async with running.chat(headers=ALICE, stream=False) as response:
            assert response.status == 200
        async with running.chat(headers=ALICE, stream=False) as response:
            assert response.status == 429
        async with running.chat(headers=BOB, stream=False) as response:
            assert response.status == 200


@pytest.mark.process
async def test_a_functions_usage_in_its_body_is_charged_to_no_account() -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"tenant_limits": {"tokens_per_min": 1000}}) as running:
        fakes[0].behave = answer(200, {"usage": {"completion_tokens": 2000}})
        for _ in range(2):
            async with running.http.get(running.url + "/fn/f", headers=ALICE) as response:
                assert response.status == 200
        assert running.proxy.ended_tokens == 0


@pytest.mark.process
@pytest.mark.parametrize(("most", "passing"), [(60, 1), (20, 3), (None, 1)])
async def test_parallel_streams_cannot_pass_the_minutes_tokens(most: int | None, passing: int) -> None:
    limit = {"tenant_limits": {"tokens_per_min": 100}}
    async with sites("ams1") as fakes, router(fakes, tables=limit) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        fields = {} if most is None else {"max_tokens": most}
        streams = await asyncio.gather(*[running.chat(headers=ALICE, **fields) for _ in range(10)])
        assert sorted(each.status for each in streams) == [200] * passing + [429] * (10 - passing)
        refused = next(each for each in streams if each.status == 429)
        assert 0 < int(refused.headers["retry-after"]) <= 60
        async with running.chat(headers=BOB, **fields) as response:
            assert response.status == 200
            fakes[0].go_on.set()
            await response.read()
        for each in streams:
            await each.read()
            each.close()
        async with running.chat(headers=ALICE, max_tokens=20) as response:
            assert response.status == 200, "unused reservations are returned"
            await response.read()
