"""Commands to sites, signed for one site and its clock. The result is an answer of limited size, or an error."""

from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_control import SiteAnswer, SiteControl
from pilotlight.wire.hop.management import WAKE_PATH, WakeHint
from tests.edge_router.fakes import FakeSite, answer, hang, sites

pytestmark = pytest.mark.process

SECRET = "a secret of these tests"


@pytest.mark.parametrize(("secret", "status"), [(SECRET, 202), ("another", 403), (None, 403)])
async def test_a_site_takes_orders_that_are_signed_with_its_secret_by_its_own_clock(
    secret: str | None, status: int
) -> None:
    async with sites("ams1") as [site], aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        site.secret, site.clock_ahead_s, site.behave = SECRET, 3600.0, answer(202, {"is": "heard"})
        clocks = SiteClocks(["ams1"])
        clocks.record("ams1", clocks.now_s("ams1") + 3600.0)
        orders = SiteControl({"ams1": site.url}, secret, clocks)
        stack.enter_context(orders.by(session))
        answered = await orders.exchange("POST", "ams1", WAKE_PATH, msgspec.json.encode(WakeHint("ember")))
        assert answered.status == status
        if status == 202:
            assert answered == SiteAnswer(202, b'{"is": "heard"}')
            assert site.bodies == [b'{"model":"ember"}']
            assert site.seen[0].content_type == "application/json"
            assert (await orders.exchange("GET", "ams1", "/timeline")).status == 202
            assert (site.seen[1].method, site.seen[1].path) == ("GET", "/timeline")
        else:
            assert site.bodies == []


async def test_a_clock_that_was_set_since_the_last_probe_costs_no_order() -> None:
    async with sites("ams1") as [site], aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        site.secret, site.clock_ahead_s, site.behave = SECRET, 3600.0, answer(202, {})
        orders = SiteControl({"ams1": site.url}, SECRET, SiteClocks(["ams1"]))
        stack.enter_context(orders.by(session))
        assert (await orders.exchange("POST", "ams1", WAKE_PATH, b"{}")).status == 202
        assert site.bodies == [b"{}"]


async def test_what_is_no_answer_says_why() -> None:
    async with sites("ams1") as [site], aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        orders = SiteControl({"ams1": site.url}, None, SiteClocks([]))
        stack.enter_context(orders.by(session))
        site.behave = hang
        assert await orders.exchange("GET", "ams1", "/x", timeout_s=0.05) == SiteAnswer(0, b"no answer within 0.05 s")
        await site.stop()
        told = await orders.exchange("GET", "ams1", "/x")
        assert (told.status, told.body.startswith(b"cannot connect: ")) == (0, True)


async def test_an_answer_without_end_is_cut() -> None:
    async def endless(site: FakeSite, request: web.Request) -> web.StreamResponse:
        response: Any = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))

    async with sites("ams1") as [site], aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        site.behave = endless
        orders = SiteControl({"ams1": site.url}, None, SiteClocks([]))
        stack.enter_context(orders.by(session))
        told = await orders.exchange("GET", "ams1", "/x", most_bytes=1 << 18)
        assert told.status == 200
        assert 1 << 18 <= len(told.body) <= (1 << 18) + (1 << 20)
