"""The figures that a router's page shows."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.telemetry.activity import RouterActivity
from pilotlight.page.source import TimeHistogram
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.hop.status import Place
from tests.edge_router.builders import Clock
from tests.edge_router.fakes import Router, continued_stream, end_it, routed_sites, router, sites

pytestmark = pytest.mark.process


async def whole(running: Router) -> dict[str, Any]:
    async with running.http.get(f"{running.url}/page/feed") as feed:
        async for line in feed.content:
            if line.startswith(b"data:"):
                found: dict[str, Any] = json.loads(line[5:])
                return found
    raise AssertionError


async def test_browsers_get_the_page_and_programs_a_line() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(running.url, headers={"accept": "text/html,*/*;q=0.8"}) as page:
            assert (page.status, page.content_type) == (200, "text/html")
            assert b"Pilotlight" in await page.read()
            assert "script-src 'self'" in page.headers["content-security-policy"]
        async with running.http.get(running.url, headers={"accept": "application/json"}) as program:
            assert (program.status, program.content_type) == (200, "text/plain")


async def test_a_moved_stream_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")  # with a secret, streams have resume points and can move
    async with routed_sites("ams1", "iad1") as (fakes, running):
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

    stream, metrics = Stream(), SimpleNamespace(requests=dict, first_tokens=lambda: TimeHistogram((), ()))
    proxy = SimpleNamespace(under_way=[stream], ended_tokens=0, metrics=metrics, selector=SimpleNamespace(backends={}))
    activity = RouterActivity(Place("here", 0.0, 0.0), "1", cast("Any", proxy), clock)
    for tokens, passed_s in ((1, 0.0), (5, 0.1), (5, 0.5), (6, 0.5)):
        clock.now += passed_s
        stream.delivered_tokens = tokens
        counted = activity.counts().token_gaps
    gaps = dict(zip((*counted.bounds_ms, None), counted.counts, strict=True))
    assert {bound: number for bound, number in gaps.items() if number} == {30: 4, 1200: 1}


async def test_a_sites_timeline_is_read_through_the_router() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(f"{running.url}/page/timeline?site=ams1") as answer:
            assert [request.path for request in fakes[0].seen if request.path == "/timeline"] == ["/timeline"]
            assert answer.status in (200, 504)
        async with running.http.get(f"{running.url}/page/timeline?site=nowhere") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
