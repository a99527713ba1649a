"""A site's response reaches the client unchanged, as it arrives, and connections are reused."""

import asyncio
import io
import json
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from tests.edge_router.fakes import (
    DONE,
    WHOLE,
    FakeSite,
    answer,
    begin,
    event,
    raw_stream,
    reset_before_first_byte,
    routed_sites,
    router,
    sites,
)
from tests.edge_router.nearest import NearestPolicy

pytestmark = pytest.mark.process


async def test_a_stream_passes_through_byte_for_byte_with_the_decision_in_a_header() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.chat(headers={"x-request-id": "mine-1"}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert await response.read() == WHOLE
        route = dict(part.split("=") for part in response.headers["x-pilotlight-route"].split("; "))
        assert route["site"] == "ams1"
        assert route["tries"] == "1"
        assert {"cost", "rtt", "queue_ahead", "prefill", "wake", "decode_step", "reason"} <= set(route)
        assert response.headers["x-request-id"] == fakes[0].seen[0].headers["x-request-id"] == "mine-1"
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 1
        assert running.counted("pilotlight_router_time_to_first_token_seconds_count", site="ams1") == 1


async def test_a_sites_own_decision_follows_the_routers() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {}, x_pilotlight_route="prompt=engine 0; here=480.0; there=120.5")
        async with running.chat(stream=False) as response:
            route = response.headers["x-pilotlight-route"]
        assert route.startswith("site=ams1; cost=")
        assert route.endswith("; prompt=engine 0; here=480.0; there=120.5")


async def test_events_arrive_while_the_site_still_generates() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        async with running.chat() as response:
            assert await response.content.readany() == event(0)
            fakes[0].go_on.set()
            assert await response.read() == event(99) + DONE


async def test_a_whole_answer_passes_through_with_its_length() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"id": "x"}, x_pilotlight_site="ams1", x_kept="1")
        async with running.chat(stream=False) as response:
            assert (await response.json(), response.headers["content-length"]) == ({"id": "x"}, "11")
        assert (response.headers["x-pilotlight-site"], response.headers["x-kept"]) == ("ams1", "1")
        async with running.http.get(URL(running.url + "/v1/models?x=%2F", encoded=True)) as response:
            assert response.status == 200
        assert fakes[0].seen[-1].raw_path == "/v1/models?x=%2F"


async def test_a_long_prompt_reaches_the_site_whole_also_at_the_second_try() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = reset_before_first_byte
        body = json.dumps({"model": "ember", "stream": True, "prompt": "lorem ipsum " * 300_000}).encode()
        async with running.http.post(running.url + "/v1/completions", data=io.BytesIO(body)) as response:
            assert await response.read() == WHOLE
        assert fakes[0].bodies == fakes[1].bodies == [body]
        assert fakes[1].seen[0].headers["content-length"] == str(len(body))


async def test_connections_to_a_site_are_used_again() -> None:
    async with sites("ams1") as fakes, router(fakes, probe_interval_s=300) as running:
        fakes[0].behave = late_end
        for _ in range(4):
            async with running.chat() as response:
                await response.read()
        peers = {
            request.transport.get_extra_info("peername") if request.transport else None for request in fakes[0].seen
        }
        assert len(peers) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422])
async def test_what_is_the_clients_own_affair_passes_through_untouched(status: int) -> None:
    body = {"error": {"message": "no", "code": "model_not_found"}}
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = answer(status, body, retry_after="3")
        async with running.chat() as response:
            assert (response.status, await response.json(), response.headers["retry-after"]) == (status, body, "3")
        assert fakes[1].bodies == []


async def test_a_tenants_own_quota_in_the_workers_dialect_passes_through() -> None:
    body = {"result": None, "success": False, "errors": [{"code": 3036, "message": "quota"}], "messages": []}
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(429, body)
        async with running.chat("/client/v4/accounts/a/ai/run/ember") as response:
            assert (response.status, await response.json()) == (429, body)


async def test_a_client_that_pauses_gets_every_event_once_and_in_order() -> None:
    events = [
        b'data: {"i": %d, "text": "%s"}\n\n' % (i, b"x" * 300_000) for i in range(60)
    ]  # more than all buffers can hold
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(*events, *(event(i) for i in range(20)), DONE)
        async with running.chat() as response:
            first = await response.content.readany()
            await running.until(lambda: any(each.is_full for each in running.server.connections))
            rest = await response.read()
        whole = b"".join([*events, *(event(i) for i in range(20)), DONE])
        assert len(first + rest) == len(whole)
        assert first + rest == whole


async def test_a_sites_own_error_event_is_the_end_and_nothing_is_added() -> None:
    failed = b'data: {"error": {"message": "engine died", "code": "engine_error"}}\n\n'
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), failed)
        async with running.chat() as response:
            assert await response.read() == event(0) + failed


async def late_end(site: FakeSite, request: web.Request) -> web.StreamResponse:
    """Send the end of the HTTP body in a packet after the last event."""
    response = await begin(request)
    await response.write(DONE)
    await asyncio.sleep(0.03)
    return response


async def test_a_fault_of_the_router_itself_is_reported_and_counted_and_frees_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingOnce(NearestPolicy):
        has_failed = False

        def rank(self, request: Any, backends: Any) -> Any:
            if not self.has_failed:
                self.has_failed = True
                raise ValueError("a fault")
            return super().rank(request, backends)

    async with sites("ams1") as fakes, router(fakes, policy=FailingOnce()) as running:
        async with running.chat(headers={"x-request-id": "mine-1"}) as response:
            assert response.status == 500
            told = (await response.json())["error"]
        assert told["code"] == "internal_error"
        assert "its log has the reason under this request id" in told["message"]
        assert "request mine-1 failed inside the router" in caplog.text
        assert running.counted("pilotlight_router_requests_total", site="", outcome="internal_error") == 1
        assert running.counted("pilotlight_router_open_requests") == 0
        assert not running.proxy.under_way
        async with running.chat() as response:
            assert response.status == 200
