"""A request's accounting: its reservation of a quota, its records, and the models that its client can list."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.admission.quotas.daily import DailyQuotas, Reserved
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger import Ledger
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.requests.request import Head, RequestParser, ValidRequest
from pilotlight.sites.network import CustomerConfig
from pilotlight.wire.credentials import Account, Key
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, UsageRecord
from tests.edge_router.builders import Clock
from tests.edge_router.metering.ledger.conftest import PRICES

NOW_S = Clock().now
ACME = Account("acme")


def record(account: str, use: ResourceUse, *, started_s: float = NOW_S, model: str = "m") -> UsageRecord:
    asked = MeteredRequest("id", "r", account, "k", model, started_s)
    return UsageRecord(asked, "ams1", started_s, "complete", use)


class Books:
    """A ledger that records its calls. If `is_full`, it has no free meter."""

    def __init__(self) -> None:
        self.used: list[dict[str, Any]] = []
        self.recovered: list[UsageRecord] = []
        self.started: list[tuple[str, str]] = []
        self.ended: list[tuple[str, float]] = []
        self.is_full = False

    def used_since(self, from_s: float) -> list[dict[str, Any]]:
        assert from_s == 0.0, "the day began then"
        return self.used

    def begin(self, request: ValidRequest, model: str, adapter: str) -> Any:
        if self.is_full:
            raise ApiError("overloaded", "full")
        self.started.append((model, adapter))
        return SimpleNamespace(use=ResourceUse(), request=MeteredRequest("id", "r", "acme", "k", model, NOW_S))

    def end(self, meter: Any, outcome: str, took_s: float) -> None:
        self.ended.append((outcome, took_s))


class Quotas(DailyQuotas):
    """Quotas that record their calls."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.told: list[tuple[Any, ...]] = []
        self.set([CustomerConfig(name="acme", tokens_per_day=10_000)])

    def used_by(self, account: str) -> tuple[int, int]:
        """Return an account's tokens and cost of today."""
        use = self._used[account]
        return use.tokens, use.cost

    def recovered(self, account: str, started_s: float, tokens: int, cost: int) -> None:
        self.told.append(("recovered", account, started_s, tokens, cost))

    async def ready(self, account: str, tokens: int, cost: int) -> None:
        self.told.append(("ready", account, tokens, cost))

    def reserve(self, account: str, tokens: int, cost: int) -> Reserved:
        self.told.append(("reserve", account, tokens, cost))
        return super().reserve(account, tokens, cost)

    def settle(self, reserved: Reserved | None, tokens: int, cost: int) -> None:
        self.told.append(("settle", tokens, cost))
        super().settle(reserved, tokens, cost)


def accounting(books: Books | None = None, prices: PriceList = PRICES) -> tuple[Accounting, Quotas]:
    quotas = Quotas()
    return Accounting(prices, cast(Ledger, books), quotas), quotas


def asked(
    account: Account | None = ACME, method: str = "POST", path: str = "/v1/completions", model: str = "m"
) -> ValidRequest:
    head = Head(method, path, path, [])
    head.hold(None if account is None else Key("k", "", account=account))
    body = b'{"model": "%s", "prompt": "%s", "max_tokens": 7}' % (model.encode(), b"x" * 400)
    return RequestParser("", 4, lambda *_: None).parse(head, body if method == "POST" else b"", "r", "")


def own_names(model: str) -> tuple[str, str]:
    return model.removeprefix("@x/"), "french" if model == "m:french" else ""


def test_a_router_starts_with_todays_usage_and_reports_to_others_what_it_died_with() -> None:
    books = Books()
    books.used = [
        {"account": "acme", "prompt_tokens": 10, "output_tokens": 5, "cost": 3},
        {"account": "acme", "prompt_tokens": 1, "output_tokens": 1, "cost": None},
    ]
    books.recovered = [record("acme", ResourceUse(10, 4, 20)), record("acme", ResourceUse(1, 0, 2), model="free")]
    _, quotas = accounting(books)
    assert quotas.used_by("acme") == (17, 3)
    assert quotas.told == [("recovered", "acme", NOW_S, 30, 6 * 1000 + 20 * 2000), ("recovered", "acme", NOW_S, 3, 0)]


async def test_a_request_reserves_what_it_may_come_to_and_settles_for_what_it_came_to() -> None:
    books = Books()
    kept, quotas = accounting(books)
    request = asked(model="@x/m")
    charge = await kept.begin(request, own_names)
    assert charge is not None
    tokens, cost = request.conversation.tokens + 7, request.conversation.tokens * 1000 + 7 * 2000
    assert request.conversation.tokens >= 100
    assert quotas.told == [("ready", "acme", tokens, cost), ("reserve", "acme", tokens, cost)]
    assert books.started == [("m", "")]
    cast(Any, charge.meter).use = ResourceUse(10, 4, 3)
    kept.end(charge, is_complete=True, took_s=2.5)
    assert quotas.told[2:] == [("settle", 13, 6 * 1000 + 3 * 2000)]
    assert quotas.used_by("acme") == (13, 12_000)


async def test_an_answer_that_another_router_has_started_reserves_nothing_and_counts() -> None:
    books = Books()
    kept, quotas = accounting(books)
    charge = await kept.begin(asked(), own_names, is_continued=True)
    assert charge is not None
    assert quotas.told == []
    cast(Any, charge.meter).use = ResourceUse(10, 4, 3)
    kept.end(charge, is_complete=False, took_s=1.5)
    assert books.ended == [("cut", 1.5)]
    assert quotas.used_by("acme") == (13, 12_000)


@pytest.mark.parametrize(("method", "path"), [("POST", "/fn/f"), ("GET", "/v1/models")])
async def test_requests_without_a_model_are_not_recorded(method: str, path: str) -> None:
    books = Books()
    kept, quotas = accounting(books)
    assert await kept.begin(asked(ACME, method, path), own_names) is None
    assert (books.started, quotas.told) == ([], [])


async def test_nothing_is_kept_reserved_for_a_request_that_is_not_written_down() -> None:
    books = Books()
    books.is_full = True
    kept, quotas = accounting(books)
    with pytest.raises(ApiError, match="full"):
        await kept.begin(asked(), own_names)
    assert quotas.told[-1] == ("settle", 0, 0)
    assert quotas.used_by("acme") == (0, 0)


async def test_what_is_counted_is_models_work_under_the_name_that_is_theirs() -> None:
    books = Books()
    kept, quotas = accounting(books)
    assert await kept.begin(asked(None, model="m:french"), own_names) is not None
    assert (books.started, quotas.told) == ([("m:french", "french")], []), "an unknown account has no quota"
    for request in (asked(method="GET", path="/v1/models"), asked(path="/fn/f")):
        assert await kept.begin(request, own_names) is None
    assert len(books.started) == 1
    without, quotas = accounting()
    assert await without.begin(asked(), own_names) is None


def test_what_functions_have_used_counts_against_their_accounts_quotas() -> None:
    kept, quotas = accounting()
    kept.count([record("acme", ResourceUse(10, 4, 20)), record("acme", ResourceUse(1, 0, 1), model="free")])
    assert quotas.used_by("acme") == (32, 46_000)
