"""The router in operation: drains, and pages with its state."""

import asyncio
from typing import Any

import pytest

from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from tests.edge_router.fakes import (
    DONE,
    WHOLE,
    continued_stream,
    event,
    last_error,
    raw_stream,
    routed_sites,
    router,
    sites,
)

pytestmark = pytest.mark.process


async def test_a_drain_that_finds_a_client_still_sending_its_body_does_not_forward_it() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")
        await running.until(lambda: running.counted("pilotlight_router_open_requests") == 1)
        drain = asyncio.ensure_future(running.proxy.drain(0.0))
        await asyncio.sleep(0)
        writer.write(b"}")
        assert b" 503 " in await reader.readline()
        writer.close()
        await drain
        assert fakes[0].bodies == []


async def test_a_drain_lets_streams_finish_refuses_new_ones_and_reports_those_it_cuts() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        async with running.chat() as finishing:
            await finishing.content.readany()
            drain = asyncio.ensure_future(running.proxy.drain(5.0))
            await asyncio.sleep(0)
            async with running.chat() as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "draining"
            fakes[0].go_on.set()
            assert (await finishing.read()).endswith(DONE)
        await drain
        running.proxy.admission.is_draining = False
        fakes[0].behave = raw_stream(event(0), end="hang")
        async with running.chat() as cut:
            await cut.content.readany()
            await running.proxy.drain(0.0)
            assert last_error(await cut.read())["error"]["code"] == "draining"


async def test_own_pages_say_what_the_router_sees() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:

        async def get(path: str, **request: Any) -> tuple[int, Any]:
            async with running.http.get(running.url + path, **request) as response:
                return response.status, await response.json()

        assert (await get("/livez"))[0] == 200
        status, ready = await get("/readyz")
        assert (status, ready["healthy"]) == (200, ["ams1", "iad1"])
        _, seen = await get("/status")
        assert {site["site"]: site["state"] for site in seen["sites"]} == {"ams1": "healthy", "iad1": "healthy"}
        assert seen["process"]["role"] == "router"
        _, ranked = await get("/debug/route?model=ember", headers={"x-client-geo": "38.9,-77.4"})
        assert [entry["site"] for entry in ranked["ranking"]] == ["iad1", "ams1"]
        assert set(ranked["ranking"][0]["terms"]) == {
            "rtt",
            "queue_ahead",
            "prefill",
            "wake",
            "decode_step",
            "full",
            "doubt",
            "lateness",
        }
        status, refused = await get("/debug/route?model=ember", headers={"x-client-geo": "nowhere"})
        assert (status, refused["error"]["param"]) == (400, "x-client-geo")
        async with running.http.post(
            running.url + "/debug/route", json={"model": "ember", "prompt": "x" * 4000}
        ) as response:
            assert 990 < (await response.json())["prompt_tokens"] < 1010
        async with running.http.get(running.url + "/metrics") as response:
            text = await response.text()
        assert 'pilotlight_router_site_state{site="ams1",state="healthy"} 1.0' in text
        await fakes[0].stop()
        fakes[1].status_body = b"{}"
        await running.until_states(ams1="unhealthy", iad1="unhealthy")
        status, ready = await get("/readyz")
        assert status == 503
        assert set(ready["not_healthy"]) == {"ams1", "iad1"}


async def test_a_site_whose_secret_changes_is_left_alone_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")
    async with routed_sites("ams1", "iad1") as (fakes, running):
        for fake in fakes:
            fake.secret, fake.behave = "s3cret", continued_stream(4)
        fakes[0].secret = "another"
        for _ in range(20):  # before and after the site's next probe
            async with running.chat() as response:
                assert await response.read() == WHOLE
        await running.until_states(ams1="unhealthy")
        detail = running.proxy.selector.backends["ams1"].detail
        assert "refuses this router's signature" in detail
        assert f"{fakes[0].url} the address of ams1" in detail  # another site's address has the same effect
        assert fakes[0].seen == []
        fakes[0].secret = "s3cret"
        await running.until_states(ams1="healthy")
        async with running.chat() as response:
            assert await response.read() == WHOLE
        assert len(fakes[0].seen) == 1


async def test_a_decision_comes_with_the_age_of_its_news() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, probe_interval_s=60.0) as running:
        backend = running.proxy.selector.backends["ams1"]
        backend.published.at -= 100.0
        backend.cordon("")  # a change, after which it is looked at anew
        async with running.http.get(running.url + "/debug/route?model=ember") as response:
            ranking = (await response.json())["ranking"]
        ages = {entry["site"]: entry["status_age_s"] for entry in ranking}
        assert 100.0 <= ages["ams1"] < 160.0
        assert 0.0 <= ages["iad1"] < 60.0
