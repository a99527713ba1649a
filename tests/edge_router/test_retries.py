"""A site that fails before its first byte costs the client only time."""

import asyncio

import pytest

from pilotlight.edge_router.backends.backend import EJECT_AFTER
from pilotlight.wire.http.client import ConnectionPool, Origin, UpstreamConnection
from tests.edge_router.fakes import (
    WHOLE,
    Behaviour,
    answer,
    hang,
    raw_stream,
    refuse,
    reset_before_first_byte,
    routed_sites,
    router,
    sites,
    stream_of,
)

pytestmark = pytest.mark.process

FAILURES: dict[str, Behaviour] = {
    "reset before the first byte": reset_before_first_byte,
    "closed after the headers": raw_stream(),
    "reset after the headers": raw_stream(end="reset"),
    "only a heartbeat, then the end": raw_stream(b": keep-alive\n\n"),
    "half an event, then the end": raw_stream(b'data: {"i":'),
    "a page of HTML called an event stream": raw_stream(b"<html>\n<body>\n\n</html>\n"),
    "502": answer(502, {}),
    "503 draining": refuse("draining"),
    "500 engine_error": refuse("engine_error", 500, "the engine host went away"),
    "500 model_load_failed": refuse("model_load_failed", 500, "the disk is full"),
    "403 for the hop's signature": refuse("signature", 403),
    "403 for a clock": refuse("clock", 403),
    "a refusal in a word that is not known": refuse("tired"),
    "503 that is no JSON object": answer(503, [1]),
    "504": answer(504, {"error": "late"}),
    "429, as the Workers AI dialect says that a site is full": refuse("overloaded", 429),
    "an event larger than a router should buffer": raw_stream(b"data: " + b"x" * (5 << 20)),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_before_the_first_byte_costs_the_client_nothing(failure: str) -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = FAILURES[failure]
        async with running.chat() as response:
            assert response.status == 200
            assert await response.read() == WHOLE
        assert "site=iad1" in response.headers["x-pilotlight-route"]
        assert "tries=2" in response.headers["x-pilotlight-route"]
        assert len(fakes[0].bodies) == 1
        assert fakes[0].bodies == fakes[1].bodies
    assert fakes[0].active == 0


async def test_a_site_that_cannot_load_one_model_is_well_where_others_are_concerned() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = FAILURES["500 model_load_failed"]
        for _ in range(2 * EJECT_AFTER):
            async with running.chat() as response:
                assert await response.read() == WHOLE
        assert not running.proxy.selector.backends["ams1"].view().is_ejected
        fakes[1].behave = fakes[0].behave
        async with running.chat() as response:
            assert response.status == 503
            assert (
                "ams1: it answered 500 (the disk is full); iad1: it answered 500 (the disk is full)"
                in (await response.json())["error"]["message"]
            )


@pytest.mark.parametrize("behaviour", [hang, raw_stream(end="hang"), raw_stream(b"data: ", end="hang")])
async def test_a_silent_site_is_left_for_the_next(behaviour: Behaviour) -> None:
    async with routed_sites("ams1", "iad1", first_byte_timeout_s=0.1) as (fakes, running):
        fakes[0].behave = behaviour
        async with running.chat() as response:
            assert await response.read() == WHOLE
        await running.until(lambda: fakes[0].active == 0)
        assert fakes[0].cancelled == 1


@pytest.mark.parametrize("wants_stream", [True, False])
async def test_a_frozen_site_is_left_as_soon_as_its_probes_fail(wants_stream: bool) -> None:
    async with routed_sites("ams1", "iad1", first_byte_timeout_s=60) as (fakes, running):
        fakes[0].behave = hang
        fakes[1].behave = stream_of(4) if wants_stream else answer(200, {"id": "x"})
        waiting = [asyncio.ensure_future(running.chat(stream=wants_stream).__aenter__()) for _ in range(3)]
        await fakes[0].asked.wait()
        fakes[0].status_body = b"frozen"
        for task in waiting:
            response = await task
            assert "site=iad1" in response.headers["x-pilotlight-route"]
            assert "tries=2" in response.headers["x-pilotlight-route"]
            assert await response.read()
            response.close()
        await running.until(lambda: fakes[0].active == 0)


async def test_a_site_that_froze_while_another_one_did_is_not_waited_for() -> None:
    async with routed_sites("ams1", "iad1", "sin1", first_byte_timeout_s=60) as (fakes, running):
        fakes[0].behave = fakes[1].behave = hang
        waiting = asyncio.ensure_future(running.chat().__aenter__())
        await fakes[0].asked.wait()
        fakes[1].status_body = b"frozen"
        await running.until_states(iad1="unhealthy")
        fakes[0].status_body = b"frozen"
        response = await waiting
        assert "site=sin1" in response.headers["x-pilotlight-route"]
        assert await response.read() == WHOLE
        response.close()
        assert fakes[1].bodies == []


async def test_refused_connections_make_a_site_unhealthy_before_any_probe_does() -> None:
    async with routed_sites("ams1", "iad1", probe_interval_s=300) as (fakes, running):
        await fakes[0].stop()
        for _ in range(2):
            async with running.chat() as response:
                assert await response.read() == WHOLE
        assert running.proxy.selector.backends["ams1"].state == "unhealthy"
        async with running.chat() as response:
            assert "tries=1" in response.headers["x-pilotlight-route"]


async def test_a_connection_is_not_tried_at_more_sites_than_allowed() -> None:
    async with routed_sites("ams1", "iad1", "sin1", max_tries=2) as (fakes, running):
        fakes[0].behave = fakes[1].behave = refuse("draining", message="the site drains", retry_after="7")
        async with running.chat() as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "7"
            error = (await response.json())["error"]
        assert error["code"] == "no_site_available"
        assert "ams1: it answered 503 (the site drains); iad1: it answered 503" in error["message"]
        assert fakes[2].bodies == []


@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("wants_stream", [True, False])
async def test_a_site_that_answers_with_plain_failures_is_left_for_the_next_and_put_aside(
    status: int, wants_stream: bool
) -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = answer(status, {"error": {"message": "a proxy before it crashed"}})
        for _ in range(EJECT_AFTER):
            async with running.chat(stream=wants_stream) as response:
                assert response.status == 200
                assert "site=iad1" in response.headers["x-pilotlight-route"]
        ams1 = running.proxy.selector.backends["ams1"]
        await running.until(lambda: ams1.view().is_ejected)
        assert len(fakes[0].bodies) == EJECT_AFTER
        async with running.chat(stream=wants_stream) as response:
            assert "tries=1" in response.headers["x-pilotlight-route"]
        assert running.counted("pilotlight_router_tries_total", site="ams1", result="failing") == EJECT_AFTER


async def test_a_failure_in_the_same_words_at_two_sites_is_the_requests_and_no_site_is_put_aside() -> None:
    body = {"error": {"message": "this request always fails", "code": "internal_error"}}
    async with sites("ams1", "iad1", "sin1") as fakes, router(fakes) as running:
        for fake in fakes:
            fake.behave = answer(500, body, retry_after="3")
        for _ in range(2 * EJECT_AFTER):
            async with running.chat() as response:
                assert (response.status, await response.json(), response.headers["retry-after"]) == (500, body, "3")
        assert sum(len(fake.bodies) for fake in fakes) == 4 * EJECT_AFTER
        assert not any(backend.view().is_ejected for backend in running.proxy.selector.backends.values())


async def test_a_plain_failure_is_passed_on_where_there_is_no_other_site_or_a_function_may_have_done_something() -> (
    None
):
    body = {"error": {"message": "no"}}
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = answer(500, body)
        for method in ("GET", "POST"):
            async with running.http.request(method, running.url + "/fn/notes/") as response:
                assert (response.status, await response.json()) == (500, body)
        assert fakes[1].bodies == []
        await fakes[1].stop()
        await running.until_states(iad1="unhealthy")
        async with running.chat() as response:
            assert (response.status, await response.json()) == (500, body)


async def test_a_site_that_missed_its_probes_is_asked_before_a_request_is_refused() -> None:
    async with routed_sites("ams1", "iad1", "sin1", probe_interval_s=300) as (fakes, running):
        for _ in range(3):
            running.proxy.selector.backends["sin1"].failed("its probe was late")
        assert running.proxy.selector.backends["sin1"].state == "unhealthy"
        await fakes[0].stop()
        await fakes[1].stop()
        async with running.chat() as response:
            assert await response.read() == WHOLE
        assert "site=sin1" in response.headers["x-pilotlight-route"]
        assert "tries=3" in response.headers["x-pilotlight-route"]


async def test_a_site_without_the_model_is_not_asked_for_it_because_those_that_have_it_failed() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[1].status_fields = {"models": ()}
        await running.until(lambda: running.proxy.selector.backends["iad1"].view().model("ember") is None)
        fakes[0].behave = reset_before_first_byte
        async with running.chat() as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_site_available"
        assert fakes[1].bodies == []


async def test_a_post_to_a_function_that_a_site_refused_for_our_signature_runs_elsewhere() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave, fakes[1].behave = refuse("signature", 403), answer(200, {})
        async with running.http.post(running.url + "/fn/f", data=b"x") as response:
            assert response.status == 200
        fakes[1].behave = fakes[0].behave
        async with running.http.post(running.url + "/fn/f", data=b"x") as response:
            assert response.status == 503  # a 403 would blame the client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/fn/f"])
async def test_a_site_that_accepts_and_closes_at_once_costs_the_client_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port: int | None = None

    class Closing(ConnectionPool):
        """Connections to a site without free descriptors, or to its load balancer: each new one is closed at once."""

        async def connect(self, origin: Origin) -> UpstreamConnection:
            connection = await super().connect(origin)
            if origin.port == port:
                connection.eof_received()
            return connection

    monkeypatch.setattr("pilotlight.edge_router.forwarding.upstream.ConnectionPool", Closing)
    async with routed_sites("ams1", "iad1") as (fakes, running):
        port = fakes[0].port
        fakes[1].behave = answer(200, {})
        for _ in range(3):
            async with running.http.post(running.url + path, json={"model": "ember"}) as response:
                assert response.status == 200
        assert len(fakes[1].seen) == 3
