"""A site may decline a new request that another site can take.

A decline costs a round trip but is no failure, and a request is declined a few times at most.
"""

from collections.abc import Sequence

import pytest
from aiohttp import web
from msgspec.structs import replace

from pilotlight.edge_router.routing.views import MAX_DECLINES, BackendView, Preference, RouteRequest
from pilotlight.wire.hop.headers import MAX_QUEUE_WAIT, PREFIXES, QUEUE
from pilotlight.wire.hop.prefixes import decode_prompt_prefixes
from tests.edge_router.fakes import DONE, Behaviour, FakeSite, continued_stream, event, refuse, router, sites
from tests.edge_router.nearest import NearestPolicy

pytestmark = pytest.mark.process


class Patient(NearestPolicy):
    """A policy that orders sites by name, and accepts a queue of 100 ms at each."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        order = sorted(super().rank(request, backends), key=lambda preference: preference.backend.name)
        return [replace(preference, max_queue_ms=100.4) for preference in order]


def declines_if_it_may(then: Behaviour) -> Behaviour:
    declined = refuse("overloaded", **{QUEUE: "4321"})

    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        return await (declined if MAX_QUEUE_WAIT in request.headers else then)(site, request)

    return behave


@pytest.fixture(autouse=True)
def _a_network_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")


async def test_a_site_that_declines_is_left_for_the_next_keeps_its_trust_and_its_queue_is_known() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=Patient(), probe_interval_s=60.0) as running:
        fakes[0].behave = declines_if_it_may(continued_stream(4))
        fakes[1].behave = continued_stream(4)
        for _ in range(8):  # as failures, these would eject the site
            async with running.chat() as response:
                assert await response.read() == b"".join(event(i) for i in range(4)) + DONE
            assert "site=iad1" in response.headers["x-pilotlight-route"]
        assert fakes[0].seen[0].headers[MAX_QUEUE_WAIT] == "100"
        view = running.proxy.selector.backends["ams1"].view()
        assert (view.state, view.is_ejected) == ("healthy", False)
        assert view.status is not None
        assert view.status.models[0].queued_tokens == 4321
        assert running.counted("pilotlight_router_tries_total", site="ams1", result="declined") == 8
        assert running.proxy.selector.retries.left > 40  # a decline costs nothing of the retry budget


async def test_no_request_is_declined_more_often_than_it_should_be() -> None:
    names = ("ams1", "iad1", "sin1")
    async with sites(*names) as fakes, router(fakes, policy=Patient()) as running:
        for fake in fakes:
            fake.behave = declines_if_it_may(continued_stream(4))
        async with running.chat() as response:
            await response.read()
        asked = [MAX_QUEUE_WAIT in request.headers for fake in fakes for request in fake.seen]
        assert asked.count(True) == MAX_DECLINES
        assert asked.count(False) == 1
        assert "site=ams1" in response.headers["x-pilotlight-route"], "the best site, now that queues are known"


async def test_a_request_that_has_lost_a_site_may_be_declined_by_the_next_and_pays_for_one_further_try() -> None:
    async with sites("ams1", "iad1", "sin1") as fakes, router(fakes, policy=Patient()) as running:
        fakes[0].behave, fakes[2].behave = refuse("overloaded"), continued_stream(4)
        fakes[1].behave = declines_if_it_may(continued_stream(4))
        while running.proxy.selector.retries.left >= 2:
            running.proxy.selector.retries.withdraw()
        left = running.proxy.selector.retries.left
        async with running.chat() as response:
            assert response.status == 200
        assert [len(fake.seen) for fake in fakes] == [1, 1, 1]
        assert running.proxy.selector.retries.left > left - 1.5


async def test_a_site_that_declines_what_it_was_not_free_to_decline_has_failed() -> None:
    async with sites("ams1") as fakes, router(fakes, policy=Patient()) as running:
        fakes[0].behave = refuse("overloaded", **{QUEUE: "4321"})
        async with running.chat() as response:
            assert response.status == 503
            assert "4321" in await response.text()
        assert len(fakes[0].seen) == 2


async def test_a_site_learns_the_digests_of_the_conversation_and_nothing_of_it_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sites("ams1") as fakes, router(fakes, policy=Patient()) as running:
        fakes[0].behave = continued_stream(4)
        async with running.chat() as response:
            await response.read()
        named = decode_prompt_prefixes(fakes[0].seen[0].headers[PREFIXES])
        assert named
        assert [tokens for _, tokens in named] == sorted((tokens for _, tokens in named), reverse=True)
    monkeypatch.delenv("PILOTLIGHT_HOP_SECRET")
    async with sites("ams1") as fakes, router(fakes, policy=Patient()) as running:
        async with running.chat() as response:
            await response.read()
        assert PREFIXES not in fakes[0].seen[0].headers
