"""Functions through a real router: unchanged bytes, no second call that may have run, no repair of a broken response."""

import asyncio
from io import BytesIO

import aiohttp
import pytest

from pilotlight.edge_router.backends.backend import EJECT_AFTER
from tests.edge_router.fakes import (
    DRAINING,
    answer,
    raw_stream,
    refuse,
    reset_before_first_byte,
    routed_sites,
    router,
    sites,
)

pytestmark = pytest.mark.process


async def test_a_head_request_learns_no_length_that_the_site_does_not_name() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for behave, length in ((raw_stream(b"a stream"), None), (answer(200, {"a": 1}), "8")):
            fakes[0].behave = behave
            async with running.http.head(running.url + "/fn/f") as response:
                assert (response.status, response.headers.get("content-length")) == (200, length)


async def test_a_functions_stream_passes_as_it_is_and_as_it_comes() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(b"data: half an eve", b"nt, and no [DONE]")
        async with running.http.post(running.url + "/fn/f/x?y=1", data=b"\x00 no JSON") as response:
            assert await response.read() == b"data: half an event, and no [DONE]"
        assert fakes[0].bodies == [b"\x00 no JSON"]
        assert fakes[0].seen[0].path_qs == "/fn/f/x?y=1"


async def test_a_functions_upload_may_be_larger_than_a_prompt() -> None:
    async with sites("ams1") as fakes, router(fakes, max_body_mib=1, max_function_body_mib=3) as running:
        fakes[0].behave = answer(200, {})
        upload = bytes(2 << 20)
        async with running.http.post(running.url + "/fn/f", data=BytesIO(upload)) as response:
            assert response.status == 200
        assert fakes[0].bodies == [upload]
        for path, setting, size in (("/fn/f", "max_function_body_mib", 4), ("/v1/chat/completions", "max_body_mib", 2)):
            async with running.http.post(running.url + path, data=BytesIO(bytes(size << 20))) as response:
                assert (response.status, f"(relay.{setting})" in await response.text()) == (413, True)


@pytest.mark.parametrize(("method", "status", "tries"), [("POST", 502, 0), ("GET", 200, 1), ("PUT", 200, 1)])
async def test_only_what_may_be_repeated_is_tried_elsewhere_once_it_may_have_run(
    method: str, status: int, tries: int
) -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = reset_before_first_byte
        fakes[1].behave = answer(200, {})
        async with running.http.request(method, running.url + "/fn/f") as response:
            assert response.status == status
        assert len(fakes[1].seen) == tries


async def test_a_draining_site_has_not_run_it_and_a_functions_own_503_is_an_answer() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = refuse("draining")
        fakes[1].behave = answer(503, {"mine": True})
        async with running.http.post(running.url + "/fn/f", data=b"x") as response:
            assert response.status == 503
            assert await response.json() == {"mine": True}
        assert len(fakes[1].seen) == 1


@pytest.mark.parametrize("body", [DRAINING, {"error": {"code": "overloaded"}}, {"errors": [{"code": 3040}]}])
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_what_a_function_says_in_its_body_is_never_taken_for_its_sites_word(status: int, body: object) -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = answer(status, body)
        for _ in range(2 * EJECT_AFTER):
            async with running.http.post(running.url + "/fn/f", data=b"x") as response:
                assert (response.status, await response.json()) == (status, body)
        view = running.proxy.selector.backends["ams1"].view()
        assert (view.state, view.is_ejected) == ("healthy", False)
        assert fakes[1].seen == []


async def test_a_stream_that_breaks_off_has_no_end_for_its_client_either() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = raw_stream(b"some", end="reset")
        async with running.http.get(running.url + "/fn/f") as response:
            assert await response.content.readany() == b"some"
            with pytest.raises(aiohttp.ClientPayloadError):
                await asyncio.wait_for(response.read(), 60)
        assert fakes[1].seen == []


async def test_a_function_learns_the_host_that_its_client_has_named_whatever_the_client_says_of_it() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        host = running.url.partition("://")[2]
        for given in ({}, {"x-pilotlight-origin": "https://evil.example", "x-pilotlight-hop": "forged"}):
            async with running.http.get(running.url + "/fn/f", headers=given):
                pass
        assert [request.headers["x-pilotlight-origin"] for request in fakes[0].seen] == [f"http://{host}"] * 2


async def test_a_function_learns_its_clients_address_whatever_the_client_says() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for given in ({}, {"cf-connecting-ip": "192.0.2.7", "x-pilotlight-hop": "forged"}):
            async with running.http.get(running.url + "/fn/f", headers=given):
                pass
        assert [request.headers["cf-connecting-ip"] for request in fakes[0].seen] == ["127.0.0.1", "127.0.0.1"]
