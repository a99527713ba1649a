"""Sites are avoided if they answer later than their published figures let a router expect."""

import asyncio

import pytest
from aiohttp import web

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.backends.lateness import HALF_LIFE_S, TOLERANCE, Lateness
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import RouteRequest
from tests.edge_router.builders import Clock, network, site_status
from tests.edge_router.fakes import DONE, FakeSite, begin, event, router
from tests.edge_router.fakes import sites as fake_sites


def sites() -> tuple[Clock, Backend, Backend]:
    clock = Clock()
    backends = Discovery(network({"ams1": "http://127.0.0.1:1", "iad1": "http://127.0.0.1:2"}), clock).backends
    for name, rtt_ms in (("ams1", 1.0), ("iad1", 90.0)):
        backends[name].answered(site_status(name), clock())
        backends[name].round_trip.observe(rtt_ms)
    return clock, backends["ams1"], backends["iad1"]


def chosen(*backends: Backend) -> str:
    request = RouteRequest("ember", 1000, b"k", now_s=0.0)
    return CostPolicy().rank(request, [each.view() for each in backends])[0].backend.name


def test_answers_that_are_a_little_late_are_forgiven_and_late_ones_add_up() -> None:
    lateness = Lateness(Clock())
    for _ in range(50):
        lateness.observe(100.0, 100.0 * TOLERANCE)
    assert lateness.mean_ms() == 0.0
    lateness = Lateness(Clock())
    means = []
    for _ in range(30):
        lateness.observe(100.0, 1150.0)
        means.append(lateness.mean_ms())
    assert means == sorted(means)
    assert means[0] == pytest.approx(250.0)  # one late answer has little weight
    assert means[-1] == pytest.approx(1000.0, rel=0.1)


def test_lateness_is_forgotten_so_that_a_site_is_tried_again() -> None:
    clock = Clock()
    lateness = Lateness(clock)
    for _ in range(3):
        lateness.observe(100.0, 10_150.0)
    before = lateness.mean_ms()
    clock.advance(HALF_LIFE_S)
    assert lateness.mean_ms() == pytest.approx(
        before * 2 / 3
    )  # now three late answers count as one and a half; three punctual ones are always assumed
    clock.advance(20 * HALF_LIFE_S)
    assert lateness.mean_ms() == 0.0


def test_answers_in_time_make_up_for_late_ones_and_not_for_those_to_come() -> None:
    lateness = Lateness(Clock())
    for _ in range(100):
        lateness.observe(1000.0, 900.0)
    lateness.observe(100.0, 10_150.0)
    assert lateness.mean_ms() > 0.0
    for _ in range(20):
        lateness.observe(1000.0, 900.0)
    assert lateness.mean_ms() == 0.0


def test_a_site_that_publishes_no_queue_is_left_when_its_answers_come_late() -> None:
    clock, liar, honest = sites()
    assert chosen(liar, honest) == "ams1"
    for sequence in range(2, 5):
        liar.first_token(500.0, 3000.0)
        liar.answered(site_status("ams1", sequence), clock())  # the site still publishes an empty queue
    assert chosen(liar, honest) == "iad1"
    clock.advance(10 * HALF_LIFE_S)
    for backend in (liar, honest):
        backend.answered(site_status(backend.name, 9), clock())
    assert chosen(liar, honest) == "ams1"


def test_an_answer_that_has_not_come_yet_is_late_already() -> None:
    clock, liar, honest = sites()
    with liar.inflight(1000, expected_ms=500.0) as ticket:
        clock.advance(3.0)
        for backend in (liar, honest):
            backend.answered(site_status(backend.name, 2), clock())
        assert liar.view().lateness_ms == pytest.approx((3000 - TOLERANCE * 500) / 4)
        assert chosen(liar, honest) == "iad1"
        ticket.answering()
    assert liar.view().lateness_ms == 0.0


def test_unanswered_work_outlives_a_status_that_does_not_know_of_it() -> None:
    clock, liar, honest = sites()
    with liar.inflight(800, expected_ms=500.0) as first, liar.inflight(3000, expected_ms=2000.0) as second:
        clock.advance(0.5)
        liar.answered(site_status("ams1", 2), clock())
        seen = liar.view()
        assert (seen.pending_tokens, seen.unanswered_tokens) == (0, 3000)  # the first request may be almost done
        assert chosen(liar, honest) == "iad1"
        first.answering()
        assert liar.view().unanswered_tokens == 0
        second.answering()
    assert liar.view().unanswered_tokens == 0


def test_an_answer_in_one_piece_and_an_overtaken_request_say_nothing_of_the_queue() -> None:
    clock, site, _ = sites()
    with site.inflight(800, expected_ms=100.0), site.inflight(700), site.inflight(600, expected_ms=100.0) as third:
        assert site.view().unanswered_tokens == 600
        clock.advance(30.0)
        third.answering()  # a later request is answered, so the first one does not wait in a queue
        assert (site.view().unanswered_tokens, site.view().lateness_ms) == (0, 0.0)


def test_a_refusal_is_no_answer_to_those_that_wait() -> None:
    clock, site, _ = sites()
    with site.inflight(800, expected_ms=100.0), site.inflight(600, expected_ms=100.0) as declined:
        clock.advance(2.0)
        declined.refused()
        assert site.view().lateness_ms > 0


@pytest.mark.process
async def test_a_router_sees_what_a_site_owes_it_whatever_the_site_publishes() -> None:
    async def when_told(site: FakeSite, request: web.Request) -> web.StreamResponse:
        await site.go_on.wait()
        response = await begin(request)
        await response.write(event(0) + DONE)
        return response

    async with fake_sites("ams1") as [site], router([site]) as running, asyncio.timeout(60):
        site.behave = when_told
        backend = running.proxy.selector.backends["ams1"]

        async def ask() -> None:
            async with running.chat() as response:
                await response.read()

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            group.create_task(ask())
            await running.until(lambda: backend.view().unanswered_tokens > 0)
            sequence = backend.view().status.sequence
            await running.until(lambda: backend.view().lateness_ms > 100)
            assert backend.view().status.sequence > sequence
            assert backend.view().unanswered_tokens > 0  # although the site's newer status counts no waiting request
            site.go_on.set()
        await running.until(lambda: backend.view().unanswered_tokens == 0)
        assert backend.view().lateness_ms > 0
