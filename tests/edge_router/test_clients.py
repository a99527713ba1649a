"""Clients that disconnect, do not read, send too much, or pretend to be a router or another client."""

import asyncio
import gc
import io
from hashlib import sha256
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from pilotlight.edge_router.forwarding.request_state import RequestState
from tests.edge_router.fakes import DONE, WHOLE, FakeSite, begin, event, hang, raw_stream, router, sites

pytestmark = pytest.mark.process


async def test_a_client_that_leaves_before_the_first_byte_closes_the_upstream() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = hang
        waiting = asyncio.ensure_future(
            running.http.post(running.url + "/v1/chat/completions", json={"model": "ember"})
        )
        await fakes[0].asked.wait()
        assert running.proxy.selector.backends["ams1"].outstanding == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.until(lambda: fakes[0].cancelled == 1)
        await running.until(
            lambda: running.counted("pilotlight_router_requests_total", site="", outcome="client_gone") == 1
        )


async def test_a_whole_answer_is_not_computed_on_for_a_client_that_has_left() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = hang
        asking = asyncio.ensure_future(read(running.chat(stream=False)))
        await fakes[0].asked.wait()
        running.proxy.upstream.silence.watched.clear()  # so the periodic check does not find the disconnect
        asking.cancel()
        await running.until(lambda: fakes[0].cancelled == 1)


async def read(asked: Any) -> Any:
    async with asked as response:
        return await response.read()


async def test_a_client_that_leaves_in_mid_stream_closes_the_upstream() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="hang")
        async with running.chat() as response:
            assert await response.content.readany() == event(0)
            response.close()
        await running.until(lambda: fakes[0].cancelled == 1)
        await running.until(
            lambda: running.counted("pilotlight_router_requests_total", site="", outcome="client_gone") == 1
        )


async def test_a_client_that_leaves_at_the_last_event_has_its_whole_answer() -> None:
    """OpenAI's library leaves at this event, and the site's last chunk may come later."""
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), DONE, end="hang")
        async with running.chat() as response:
            told = b""
            while not told.endswith(DONE):
                told += await response.content.readany()
            response.close()
        await running.until(lambda: not running.proxy.under_way)
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 1
        assert running.counted("pilotlight_router_requests_total", site="", outcome="client_gone") == 0


async def test_a_client_that_stops_reading_holds_back_the_site() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        written = 0

        async def pour(site: FakeSite, request: Any) -> Any:
            nonlocal written
            response = await begin(request)
            for _ in range(4000):
                await response.write(b"data: " + b"x" * 16384 + b"\n\n")
                written += 1
            await response.write(DONE)
            return response

        fakes[0].behave = pour
        async with running.chat() as response:
            await response.content.readany()
            before = -1
            while before != written:  # until the buffers are full
                before = written
                await asyncio.sleep(0.2)
            assert written < 4000
            response.close()
        await running.until(lambda: fakes[0].active == 0)


async def test_a_body_of_20_mb_is_refused_and_the_next_request_works() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for chunked in (False, True):
            data = b"x" * 20_000_000
            async with running.http.post(
                running.url + "/v1/chat/completions", data=parts(data) if chunked else io.BytesIO(data)
            ) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "body_too_large"
        assert fakes[0].bodies == []
        async with running.chat() as response:
            assert await response.read() == WHOLE


@pytest.mark.parametrize("path", ["/nope", "/v1/../status", "/ai/v1", "/client/v5/x"])
async def test_unknown_paths_are_404_and_never_reach_a_site(path: str) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(URL(running.url + path, encoded=True)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        assert fakes[0].bodies == []


async def test_a_site_gets_no_credentials_of_a_client_and_can_still_tell_clients_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")
    keys = [{"name": "ann", "key_sha256": sha256(b"key-of-ann").hexdigest()}]
    async with sites("ams1") as fakes, router(fakes, tables={"keys": keys}) as running:
        for key in ("key-of-ann", "key-of-bob", "key-of-bob", "key-of-eve"):
            mine = {"authorization": f"Bearer {key}", "cookie": "session=1", "x-api-key": key}
            async with running.chat(headers=mine) as response:
                assert response.status == 200
        async with running.chat(headers={"cookie": "session=1"}) as response:
            assert response.status == 200
        told = [request.headers for request in fakes[0].seen]
        assert all("key-of" not in str(headers) and "cookie" not in headers for headers in told)
        ann, bob, again, eve = (headers["authorization"] for headers in told[:4])
        assert (bob == again, len({ann, bob, eve})) == (True, 3)
        assert ["x-pilotlight-account" in headers for headers in told] == [True, False, False, False, False]
        assert "authorization" not in told[4]


async def test_a_function_gets_what_its_clients_send_but_no_key_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")
    keys = [{"name": "ann", "key_sha256": sha256(b"key-of-ann").hexdigest()}]
    async with sites("ams1") as fakes, router(fakes, tables={"keys": keys}) as running:
        for authorization in ("Bearer its-own-token", "Basic dXNlcjpwYXNz", "Bearer key-of-ann"):
            mine = {"authorization": authorization, "cookie": "session=1"}
            async with running.http.get(running.url + "/fn/notes/", headers=mine) as response:
                assert response.status == 200
        told = [(request.headers.get("authorization"), request.headers.get("cookie")) for request in fakes[0].seen]
        assert told == [("Bearer its-own-token", "session=1"), ("Basic dXNlcjpwYXNz", "session=1"), (None, "session=1")]


async def test_a_router_before_a_router_passes_on_whose_a_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")
    keys = {"keys": [{"name": "ann", "key_sha256": sha256(b"key-of-ann").hexdigest()}], "door": {"require_key": True}}
    async with sites("ams1") as fakes, router(fakes, tables=keys) as inner:
        async with sites("iad1") as others, router(others, tables=keys, probe_interval_s=60.0) as outer:
            outer.proxy.selector.backends["iad1"].url = inner.url
            async with outer.chat(headers={"authorization": "Bearer key-of-ann"}) as response:
                assert response.status == 200
            async with outer.chat(headers={"authorization": "Bearer another"}) as response:
                assert response.status == 401
        assert [request.headers["x-pilotlight-account"] for request in fakes[0].seen] == ["ann"]


async def parts(data: bytes) -> Any:
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]


async def write_first_and_hang(site: FakeSite, request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    await response.write(event(0))
    return await hang(site, request)


async def test_a_request_whose_client_leaves_is_forgotten_without_a_garbage_collection() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = write_first_and_hang
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                async with running.chat() as response:
                    await response.content.readany()
                    response.close()
            await running.until(lambda: not running.proxy.under_way)
            left = [each for each in gc.get_objects() if isinstance(each, RequestState)]
            assert len(left) <= 1, "of the last one a frame may still be alive"
        finally:
            gc.enable()
