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
from tests.edge_router.nearest import NearestPolicy

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


async def test_a_client_that_leaves_inside_its_own_body_reaches_no_site() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await running.until(lambda: running.counted("pilotlight_router_open_requests") == 1)
        writer.close()
        await running.until(
            lambda: running.counted("pilotlight_router_requests_total", site="", outcome="client_gone") == 1
        )
        assert fakes[0].bodies == []


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


async def test_a_body_that_never_ends_is_refused_without_reading_on_for_ever() -> None:
    async with sites("ams1") as fakes, router(fakes, max_body_mib=0.01, idle_timeout_s=0.1) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50000\r\n\r\n{")
        assert b" 413 " in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        assert fakes[0].bodies == []


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/v1/chat/completions", 400, "malformed_json"), ("/client/v4/accounts/a/ai/run/m", 400, 5004)],
)
async def test_malformed_json_is_refused_at_the_router_in_the_dialect(path: str, status: int, code: object) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.post(running.url + path, data=b'{"model":') as response:
            body = await response.json()
            assert response.status == status
            assert "x-request-id" in response.headers
        assert (body["errors"][0] if "errors" in body else body["error"])["code"] == code
        assert fakes[0].bodies == []


@pytest.mark.parametrize("path", ["/nope", "/v1/../status", "/ai/v1", "/client/v5/x"])
async def test_unknown_paths_are_404_and_never_reach_a_site(path: str) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(URL(running.url + path, encoded=True)) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        assert fakes[0].bodies == []


async def test_forged_headers_are_dropped_and_the_hop_is_counted_and_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")
    async with sites("ams1") as fakes, router(fakes) as running:
        forged = {
            "x-pilotlight-hops": "99",
            "x-pilotlight-hop": "1.aa",
            "x-pilotlight-site": "evil",
            "accept-encoding": "gzip, br",
        }
        async with running.chat(headers={**forged, "authorization": "Bearer t"}) as response:
            assert response.status == 200
        headers = fakes[0].seen[0].headers
        assert headers["x-pilotlight-hops"] == "1"
        assert headers["x-pilotlight-hop"] != "1.aa"
        assert "x-pilotlight-site" not in headers
        assert headers["accept-encoding"] == "identity"


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


async def test_a_router_that_is_its_own_site_is_stopped_after_a_few_hops() -> None:
    fake = FakeSite("ams1")
    await fake.start()
    async with router([fake], policy=NearestPolicy(), probe_interval_s=60.0) as running:
        backend = running.proxy.selector.backends["ams1"]
        backend.url = running.url
        async with running.chat() as response:
            assert response.status == 400
            assert "passed 4 routers" in (await response.json())["error"]["message"]
        backend.url = fake.url
    await fake.stop()


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
