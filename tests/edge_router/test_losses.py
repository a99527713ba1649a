"""A site is lost in mid-stream and no other one can continue: the client gets whole events, then an error event."""

import pytest

from tests.edge_router.fakes import Behaviour, event, last_error, raw_stream, routed_sites, router, sites

pytestmark = pytest.mark.process

DEATHS: dict[str, Behaviour] = {
    "reset": raw_stream(event(0), event(1), end="reset"),
    "reset inside an event": raw_stream(event(0), event(1) + b'data: {"i"', end="reset"),
    "closed without the last chunk": raw_stream(event(0), event(1), end="half-close"),
    "ended without [DONE]": raw_stream(event(0), event(1)),
    "ended inside an event": raw_stream(event(0), event(1) + b"data: {"),
    "an endless event": raw_stream(event(0), event(1), b"data: " + b"x" * (5 << 20), end="hang"),
}


@pytest.mark.parametrize("path", ["/ai/v1/chat/completions", "/client/v4/accounts/a/ai/run/ember"])
@pytest.mark.parametrize("death", DEATHS)
async def test_a_site_lost_in_mid_stream_ends_with_an_honest_event_after_whole_events(death: str, path: str) -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = DEATHS[death]
        async with running.chat(path) as response:
            body = await response.read()
        assert body.startswith(event(0) + event(1) + b"data: ")
        assert body.count(b"\n\n") == 3
        error = last_error(body)
        if path.startswith("/client"):
            assert (error["success"], error["errors"][0]["code"]) == (False, 5000)
        else:
            assert error["error"]["code"] == "upstream_lost"
            assert "ams1" in error["error"]["message"]
        assert fakes[1].bodies == []
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="lost") == 1
        await running.until(lambda: fakes[0].active == 0)


@pytest.mark.parametrize("drops", [(), (b"data: ", b'{"i"')])
async def test_a_site_silent_in_mid_stream_is_lost_even_if_bytes_drip_that_never_make_an_event(
    drops: tuple[bytes, ...],
) -> None:
    async with sites("ams1") as fakes, router(fakes, idle_timeout_s=0.1) as running:
        fakes[0].behave = raw_stream(event(0), *drops, end="hang")
        async with running.chat() as response:
            body = await response.read()
        assert body.startswith(event(0) + b"data: ")
        assert "silent" in last_error(body)["error"]["message"]
        await running.until(lambda: fakes[0].active == 0)
