"""What the router's page is told, and what an operator may do by it."""

import json
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.backends.site_control import SiteAnswer
from pilotlight.edge_router.telemetry.activity import TOKEN_GAPS_MS, Operations, RouterActivity
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.hop.hints import SLEEP_PATH, WAKE_PATH
from pilotlight.wire.hop.status import Place
from tests.edge_router.builders import Clock
from tests.edge_router.fakes import FirstThen, Router, continued_stream, end_it, router, sites

pytestmark = pytest.mark.process


async def act(running: Router, **fields: str) -> tuple[int, Any]:
    async with running.http.post(f"{running.url}/page/action", json=fields) as answer:
        return answer.status, await answer.json()


async def whole(running: Router) -> dict[str, Any]:
    async with running.http.get(f"{running.url}/page/feed") as feed:
        async for line in feed.content:
            if line.startswith(b"data:"):
                found: dict[str, Any] = json.loads(line[5:])
                return found
    raise AssertionError


async def test_browsers_get_the_page_and_programs_what_they_got_before() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(running.url, headers={"accept": "text/html,*/*;q=0.8"}) as page:
            assert (page.status, page.content_type) == (200, "text/html")
            assert b"Pilotlight" in await page.read()
            assert "script-src 'self'" in page.headers["content-security-policy"]
        async with running.http.get(running.url, headers={"accept": "application/json"}) as program:
            assert (program.status, (await program.json())["error"]["code"]) == (404, "not_found")


async def test_a_stream_that_moves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")  # a stream without a resume point does not move
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
        fakes[0].behave, fakes[1].behave = continued_stream(5, until=3, ending=end_it), continued_stream(5)
        async with running.chat() as answer:
            await answer.read()
        told = await whole(running)
        assert {site["name"]: site["state"] for site in told["sites"]} == {"ams1": "healthy", "iad1": "healthy"}
        (move,) = told["moves"]
        assert (move["from_site"], move["to_site"]) == ("ams1", "iad1")


def test_what_came_between_two_looks_counts_once_per_token_at_its_mean() -> None:
    clock = Clock()

    class Stream:
        delivered_tokens = 1

    stream, proxy = Stream(), SimpleNamespace(under_way=list[Stream]())
    activity = RouterActivity(Place("here", 0.0, 0.0), "1", cast("Any", proxy), clock)
    proxy.under_way.append(stream)
    for tokens, passed_s in ((1, 0.0), (5, 0.1), (5, 0.5), (6, 0.5)):
        clock.now += passed_s
        stream.delivered_tokens = tokens
        activity._look_at_streams()
    gaps = dict(zip((*TOKEN_GAPS_MS, None), activity._gaps, strict=True))
    assert {bound: number for bound, number in gaps.items() if number} == {30: 4, 1200: 1}


async def test_a_site_that_is_drained_here_gets_nothing_new_until_it_is_resumed() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        assert (await act(running, action="drain", site="ams1"))[0] == 202
        for _ in range(4):
            async with running.chat() as answer:
                assert "site=iad1;" in answer.headers["x-pilotlight-route"]
        (row,) = [site for site in (await whole(running))["sites"] if site["name"] == "ams1"]
        assert (row["state"], row["detail"]) == ("draining", "cordoned by an operator, here")
        assert (await act(running, action="resume", site="ams1"))[0] == 202
        await running.until_states(ams1="healthy")


@pytest.mark.parametrize(("action", "path"), [("wake", WAKE_PATH), ("sleep", SLEEP_PATH)])
async def test_an_order_reaches_the_site_and_its_refusal_the_operator(action: str, path: str) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        status, told = await act(running, action=action, site="ams1", model="ember")
        assert [request.path for request in fakes[0].seen][-1] == path
        assert json.loads(fakes[0].bodies[-1]) == {"model": "ember"}
        assert status in (202, 409), told


@pytest.mark.parametrize(
    ("answered", "timeline", "order"),
    [
        (SiteAnswer(200, b"{}"), "b'{}'", "None"),
        (SiteAnswer(202, b"{}"), "upstream_timeout: ams1: {}", "None"),
        (SiteAnswer(0, b"no answer"), "upstream_timeout: ams1: no answer", "upstream_timeout: ams1: no answer"),
        (
            SiteAnswer(409, b'{"error": {"message": "no"}}'),
            "upstream_timeout: ams1: no",
            "conflict: ams1: no",
        ),
        (SiteAnswer(300, b"x" * 500), "upstream_timeout: ams1: " + "x" * 200, "conflict: ams1: " + "x" * 200),
    ],
)
async def test_an_operator_hears_what_a_site_says_or_why_it_does_not(
    answered: SiteAnswer, timeline: str, order: str
) -> None:
    class Orders:
        async def exchange(self, *_: object) -> SiteAnswer:
            return answered

    async def told(work: Awaitable[object]) -> str:
        try:
            return str(await work)
        except ApiError as error:
            return f"{error.word}: {error.message}"

    operations = Operations({"ams1": cast("Any", SimpleNamespace(name="ams1"))}, cast("Any", Orders()))
    assert await told(operations.timeline("ams1")) == timeline
    assert await told(operations.by_name()["wake"]("ams1", "ember")) == order


async def test_orders_that_make_no_sense_are_refused_by_name() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        assert (await act(running, action="drain", site="nowhere"))[1]["error"]["code"] == "not_found"
        assert (await act(running, action="explode", site="ams1"))[1]["error"]["param"] == "action"
        form = {"data": b'{"action": "drain", "site": "ams1"}', "headers": {"content-type": "text/plain"}}
        async with running.http.post(f"{running.url}/page/action", **form) as answer:
            assert answer.status == 400, "what a form of another page can send"
        strange = {"json": {"action": "drain", "site": "ams1"}, "headers": {"origin": "https://evil.example"}}
        async with running.http.post(f"{running.url}/page/action", **strange) as answer:
            assert answer.status == 403
        async with running.http.get(f"{running.url}/page/history?range=1y") as answer:
            assert answer.status == 400


async def test_a_sites_timeline_is_read_through_the_router() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(f"{running.url}/page/timeline?site=ams1") as answer:
            assert [request.path for request in fakes[0].seen if request.path == "/timeline"] == ["/timeline"]
            assert answer.status in (200, 504)
        async with running.http.get(f"{running.url}/page/timeline?site=nowhere") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
