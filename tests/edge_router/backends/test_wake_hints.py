"""A site where the wanted model sleeps gets a hint: rarely, signed, and without delaying a request."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pilotlight.edge_router.backends.site_control import SiteAnswer, SiteControl
from pilotlight.edge_router.backends.wake_hints import EVERY_S, MAX_UNDER_WAY, WakeHints, sleeping_winner
from pilotlight.edge_router.routing.views import Preference
from pilotlight.wire.hop.headers import HOP, HOP_SECRET_ENV, REQUEST_ID, Hop, signed_body
from pilotlight.wire.hop.management import WAKE_PATH
from tests.edge_router.builders import Clock, model_status, view
from tests.edge_router.fakes import FakeSite, Router, hang, reset_before_first_byte, router, sites, stream_of

pytestmark = pytest.mark.process

ASLEEP = {"models": (model_status(residency="host", wake_ms=200.0),)}
BUSY = {"models": (model_status(queued_tokens=1000, prefill_tokens_per_s=10_000.0),)}  # a queue of 100 ms


def preference(name: str, cost_ms: float, wake_ms: float = 0.0, **model: Any) -> Preference:
    return Preference(view(name, model=model), cost_ms, {"rtt": cost_ms - wake_ms, "wake": wake_ms}, "cheapest")


def test_only_a_site_that_would_have_won_awake_gets_a_hint() -> None:
    chosen = preference("ams1", 100.0)
    cheap = preference("iad1", 250.0, 200.0, residency="host")
    cheaper = preference("sin1", 1020.0, 1000.0, residency="disk")
    dear = preference("sin1", 320.0, 200.0, residency="host")
    assert sleeping_winner("ember", [chosen, cheap, cheaper]) == ("sin1", "ember")
    assert sleeping_winner("ember", [chosen, cheap, dear]) == ("iad1", "ember")
    assert sleeping_winner("ember", [chosen, dear]) is None, "it would not have won, even awake"
    as_dear = preference("sin1", 300.0, 200.0, residency="host")
    assert sleeping_winner("ember", [chosen, as_dear]) is None, "of two sites with the same cost the chosen one stays"
    assert sleeping_winner("ember", [cheap, chosen]) is None, "the request itself wakes the model"
    assert sleeping_winner(None, [chosen, cheap]) is None


@pytest.mark.parametrize("residency", ["loading", "failed", "device"])
def test_a_model_that_does_not_sleep_needs_no_hint(residency: Any) -> None:
    assert (
        sleeping_winner("ember", [preference("ams1", 100.0), preference("iad1", 250.0, 200.0, residency=residency)])
        is None
    )


def test_an_alias_is_reported_as_the_models_own_name() -> None:
    sleeping = preference("iad1", 250.0, 200.0, residency="host", aliases=("@x/ember",))
    assert sleeping_winner("@x/ember", [preference("ams1", 100.0), sleeping]) == ("iad1", "ember")


class Hinted:
    """Two sites: at the first one the model is awake and busy, at the second one it sleeps."""

    def __init__(self, running: Router, awake: FakeSite, asleep: FakeSite) -> None:
        self.running = running
        self.awake = awake
        self.asleep = asleep

    @property
    def hints(self) -> list[web.Request]:
        return [request for request in self.asleep.seen if request.path == WAKE_PATH]

    def counted(self, outcome: str) -> float:
        return self.running.counted("pilotlight_router_wake_hints_total", site=self.asleep.name, outcome=outcome)

    async def ask(self) -> None:
        async with self.running.chat() as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

    async def until(self, outcome: str, count: int) -> None:
        async with asyncio.timeout(30):
            await self.running.until(lambda: self.counted(outcome) == count)


@pytest.fixture
async def hinted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hinted]:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")
    async with sites("ams1", "iad1") as fakes:
        fakes[0].status_fields, fakes[1].status_fields = BUSY, ASLEEP
        fakes[1].behave = accept
        async with router(fakes) as running:
            await running.until(lambda: all(b.status is not None for b in running.proxy.selector.backends.values()))
            yield Hinted(running, *fakes)


async def accept(site: FakeSite, request: web.Request) -> web.StreamResponse:
    return web.json_response({"model": "ember", "residency": "loading"}, status=202)


async def test_the_hint_is_signed_and_names_the_model(hinted: Hinted) -> None:
    await hinted.ask()
    await hinted.until("heeded", 1)
    (hint,) = hinted.hints
    assert json.loads(hinted.asleep.bodies[-1]) == {"model": "ember"}
    signature, request_id = hint.headers[HOP], hint.headers[REQUEST_ID]
    hop = Hop("POST", WAKE_PATH, request_id, hinted.asleep.name)
    assert signed_body(signature, "s3cret", time.time(), hop) == hashlib.sha256(hinted.asleep.bodies[-1]).hexdigest()
    assert [request.path for request in hinted.awake.seen] == ["/ai/v1/chat/completions"], "the request went elsewhere"


async def test_a_site_that_never_answers_delays_no_request(hinted: Hinted) -> None:
    hinted.asleep.behave = hang
    async with asyncio.timeout(30):
        for _ in range(5):
            await hinted.ask()
    await hinted.until("failed", 1)
    assert len(hinted.hints) == 1


class Unanswered:
    """Control requests that no site answers."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    async def exchange(self, method: str, site: str, path: str, body: bytes) -> SiteAnswer:
        self.sites.append(site)
        await asyncio.Event().wait()
        raise AssertionError


async def test_one_hint_in_a_while_is_enough() -> None:
    orders, clock = Unanswered(), Clock()
    preferences = [preference("ams1", 100.0), preference("iad1", 250.0, 200.0, residency="host")]
    async with WakeHints(cast("SiteControl", orders), CollectorRegistry(), clock) as hints:
        for after_s, num_sent in ((0.0, 1), (EVERY_S - 0.1, 1), (0.2, 2)):
            clock.advance(after_s)
            hints.consider("ember", preferences)
            await asyncio.sleep(0)
            assert len(orders.sites) == num_sent


async def test_hints_are_bounded_and_what_is_too_much_is_counted() -> None:
    orders, registry = Unanswered(), CollectorRegistry()
    async with WakeHints(cast("SiteControl", orders), registry) as hints:
        for i in range(MAX_UNDER_WAY + 1):
            sleeping = preference(f"site{i}", 250.0, 200.0, residency="host")
            hints.consider("ember", [preference("ams1", 100.0), sleeping])
        await asyncio.sleep(0)
        assert len(orders.sites) == MAX_UNDER_WAY
        labels = {"site": f"site{MAX_UNDER_WAY}", "outcome": "dropped"}
        assert registry.get_sample_value("pilotlight_router_wake_hints_total", labels) == 1


@pytest.mark.parametrize("broken", [reset_before_first_byte, stream_of(1)])
async def test_failures_are_counted_and_hurt_no_request(hinted: Hinted, broken: Any) -> None:
    async def refuse(site: FakeSite, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "forbidden"}}, status=403)

    is_reset = broken is reset_before_first_byte
    hinted.asleep.behave = broken if is_reset else refuse
    await hinted.ask()
    await hinted.until("failed" if is_reset else "refused", 1)
    await hinted.ask()
