"""Usage of functions reaches the ledger once, even if the answer, the store or a process is lost in between."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.edge_router.admission.quotas.daily import DailyQuotas
from pilotlight.edge_router.backends.site_control import SiteAnswer
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger import Ledger
from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery, UsageStore, UsageStoreError
from pilotlight.edge_router.metering.ledger.site_usage import SiteUsage
from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.sites.network import CustomerConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import UsageAsked
from tests.asgi import eventually
from tests.edge_router.builders import Clock
from tests.edge_router.metering.ledger.conftest import PRICES, FailingStore, Place


class Status:
    functions = ()


class Site:
    """A site that publishes its functions' usage, and whose answers may be lost."""

    name, state, status = "ams1", "healthy", Status()

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.usage = FunctionUsage(directory, self.name, lambda function: "acme", clock)
        self.num_lost = 0  # number of next answers that get lost

    async def exchange(self, method: str, site: str, path: str, body: bytes, **more: Any) -> SiteAnswer:
        told = self.usage.hand_out(msgspec.json.decode(body, type=UsageAsked))
        if self.num_lost:
            self.num_lost -= 1
            return SiteAnswer(0, b"no answer")
        return SiteAnswer(200, msgspec.json.encode(told))

    def use(self, tokens: int) -> None:
        meter = self.usage.begin("hello", "m")
        assert meter is not None
        meter.count(ResourceUse(10, 0, tokens, device_us=7))
        self.usage.end(meter, "complete")


class Made:
    def __init__(self, place: Place, tmp_path: Path, store: UsageStore | None = None) -> None:
        self.clock = Clock()
        self.ledger: Ledger = place.ledger(store=store)
        self.quotas = DailyQuotas(self.clock)
        self.quotas.set([CustomerConfig(name="acme", tokens_per_day=1000)])
        self.accounting = Accounting(PRICES, self.ledger, self.quotas)
        self.site = Site(tmp_path / "site", self.clock)
        self.collecting = self.collector()

    def collector(self) -> SiteUsage:
        """Return the collector of a router that has just started."""
        return SiteUsage({"ams1": self.site}, self.site, self.accounting)

    async def rows(self, *by: str) -> list[dict[str, Any]]:
        return await self.ledger.usage(UsageQuery(by=by))

    async def is_written(self) -> bool:
        return await self.num_unwritten() == 0

    async def num_unwritten(self) -> int:
        """Return the number of records that the site keeps."""
        asked = UsageAsked(await self.ledger.identity(), ())
        return len(self.site.usage.hand_out(asked).records)

    async def close(self) -> None:
        await self.ledger.close()
        self.site.usage.close()


async def test_what_functions_have_used_is_in_the_ledger_with_account_function_and_price(
    place: Place, tmp_path: Path
) -> None:
    made = Made(place, tmp_path)
    await made.collecting.collect()  # usage is recorded only after the first request
    made.site.use(30)
    made.site.usage.computed("hello", 0.25)
    made.clock.advance(10)
    await made.collecting.collect()
    (row,) = await made.rows("account", "function")
    assert (row["account"], row["function"], row["requests"]) == ("acme", "hello", 2)
    assert (row["prompt_tokens"], row["output_tokens"], row["device_us"], row["cpu_us"]) == (10, 30, 7, 250_000)
    assert row["cost"] == 10 * 1000 + 30 * 2000
    await made.close()


@pytest.mark.parametrize("change", [{"state": "unhealthy"}, {"state": "draining"}, {"status": None}])
async def test_a_site_that_is_not_well_or_has_no_functions_is_not_asked(
    place: Place, tmp_path: Path, change: dict[str, Any]
) -> None:
    made = Made(place, tmp_path)
    asked: list[str] = []

    async def exchange(method: str, site: str, path: str, body: bytes, **more: Any) -> SiteAnswer:
        asked.append(site)
        assert msgspec.json.decode(body, type=UsageAsked).ledger == await made.ledger.identity() != ""
        return SiteAnswer(404, b"")

    made.site.exchange = exchange
    await made.collecting.collect()
    assert asked == ["ams1"], "a site without usage is asked once"
    for name, value in change.items():
        setattr(made.site, name, value)
    await made.collecting.collect()
    assert asked == ["ams1"]
    await made.close()


async def test_lost_answers_and_restarts_write_nothing_twice(place: Place, tmp_path: Path) -> None:
    made = Made(place, tmp_path)
    await made.collecting.collect()
    for lost in range(6):
        made.site.use(10)
        made.site.num_lost = lost % 3
        for _ in range(3):
            if lost == 4:
                made.collecting = made.collector()  # a new collector does not know which records are written
            await made.collecting.collect()
    (row,) = await made.rows()
    assert (row["requests"], row["output_tokens"]) == (6, 60)
    assert await made.num_unwritten() == 0
    await made.close()


async def test_what_cannot_be_written_stays_at_its_site(place: Place, tmp_path: Path) -> None:
    store = FailingStore(place.store())
    made = Made(place, tmp_path, store)
    await made.collecting.collect()
    made.site.use(10)
    store.writes = False
    with pytest.raises(UsageStoreError, match="disk is full"):
        await made.collecting.collect()
    store.writes = True
    assert await made.num_unwritten() == 1
    await made.collecting.collect()
    (row,) = await made.rows()
    assert row["output_tokens"] == 10
    await made.close()


async def test_it_counts_against_the_accounts_day_once(place: Place, tmp_path: Path) -> None:
    made = Made(place, tmp_path)
    await made.collecting.collect()
    made.site.use(890)
    made.site.num_lost = 1
    for _ in range(3):
        await made.collecting.collect()
    made.quotas.settle(made.quotas.reserve("acme", 100, 0), 0, 0)
    with pytest.raises(ApiError, match="900 are used"):
        made.quotas.reserve("acme", 101, 0)
    await made.close()


async def test_a_stores_identity_stays(place: Place, tmp_path: Path) -> None:
    ledger = place.ledger()
    identity = await ledger.identity()
    await ledger.close()
    again = place.ledger()
    assert await again.identity() == identity != ""
    await again.close()


async def test_it_asks_on_after_whatever_went_wrong(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(place, tmp_path)
    errors = [UsageStoreError("it is away"), UsageStoreError("it is away"), ValueError("a fault")]

    class Failing:
        async def exchange(self, *arguments: Any, **more: Any) -> SiteAnswer:
            if errors:
                raise errors.pop(0)
            return await made.site.exchange(*arguments, **more)

    await made.collecting.collect()
    made.site.use(10)
    collecting = SiteUsage({"ams1": made.site}, Failing(), made.accounting, ask_every_s=0.0)
    running = asyncio.create_task(collecting.run())
    await eventually(made.is_written)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"], "one warning for both failures"
    assert (await made.rows())[0]["output_tokens"] == 10
    await made.close()


async def test_a_site_whose_answer_cannot_be_read_keeps_no_other_from_being_asked(place: Place, tmp_path: Path) -> None:
    made = Made(place, tmp_path)

    class Unreadable(Site):
        name = "bad1"

    class Orders:
        async def exchange(self, method: str, site: str, path: str, body: bytes, **more: Any) -> SiteAnswer:
            if site == "bad1":
                return SiteAnswer(200, b'{"records": 7}')
            return await made.site.exchange(method, site, path, body, **more)

    collecting = SiteUsage({"bad1": Unreadable, "ams1": made.site}, Orders(), made.accounting)
    await collecting.collect()
    made.site.use(30)
    await collecting.collect()
    (row,) = await made.rows()
    assert row["output_tokens"] == 30
    await made.close()
