"""Requests through a real router to real sites that misbehave: each client gets what is promised, and nothing is left behind."""

import asyncio
import io
import json
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from edge_router.policy.least_outstanding import LeastOutstandingPolicy
from edge_router.policy.nearest import NearestPolicy
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import (
    DONE,
    Behaviour,
    FakeSite,
    answer,
    begin,
    event,
    hang,
    raw_stream,
    reset_before_first_byte,
    reset_connection,
    router,
    sites,
    stream_of,
)

WHOLE = b"".join(event(i) for i in range(4)) + DONE
DRAINING = {"error": {"message": "the site drains", "type": "server_error", "param": None, "code": "draining"}}
FULL_WORKERS_AI = {"result": None, "success": False, "errors": [{"code": 3040, "message": "full"}], "messages": []}


class FirstThen(NearestPolicy):
    """The order of the names given, so that a test knows who is asked first."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def rank(self, request: Any, backends: Any) -> Any:
        order = {name: i for i, name in enumerate(self._names)}
        return sorted(super().rank(request, backends), key=lambda preference: order[preference.backend.name])


def last_error(body: bytes) -> dict[str, Any]:
    """The error event that ends a stream; what came before it is whole events."""
    assert body.endswith(b"\n\n")
    data = body.rstrip(b"\n").rpartition(b"\n")[2]
    assert data.startswith(b"data: ")
    fields: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return fields


async def test_a_stream_passes_through_byte_for_byte_with_the_decision_in_a_header() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.chat(headers={"x-request-id": "mine-1"}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert await response.read() == WHOLE
        route = dict(part.split("=") for part in response.headers["x-pilotlight-route"].split("; "))
        assert route["site"] == "ams1"
        assert route["tries"] == "1"
        assert {"cost", "rtt", "queue_ahead", "prefill", "wake", "decode_crowding", "reason"} <= set(route)
        assert response.headers["x-request-id"] == fakes[0].seen[0].headers["x-request-id"] == "mine-1"
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 1
        assert running.counted("pilotlight_router_time_to_first_token_seconds_count", site="ams1") == 1


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
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
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


FAILURES: dict[str, Behaviour] = {
    "reset before the first byte": reset_before_first_byte,
    "closed after the headers": raw_stream(),
    "reset after the headers": raw_stream(end="reset"),
    "only a heartbeat, then the end": raw_stream(b": keep-alive\n\n"),
    "half an event, then the end": raw_stream(b'data: {"i":'),
    "a page of HTML called an event stream": raw_stream(b"<html>\n<body>\n\n</html>\n"),
    "502": answer(502, {}),
    "503 draining": answer(503, DRAINING),
    "500 engine_error": answer(500, {"error": {"message": "the engine host went away", "code": "engine_error"}}),
    "500 in the Workers AI dialect": answer(500, {"errors": [{"code": 5000, "message": "the engine host went away"}]}),
    "503 that is no JSON object": answer(503, [1]),
    "504": answer(504, {"error": "late"}),
    "429 with Workers AI's code for full": answer(429, FULL_WORKERS_AI),
    "an event larger than anybody should buffer": raw_stream(b"data: " + b"x" * (5 << 20)),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_before_the_first_byte_costs_the_client_nothing(failure: str) -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
        fakes[0].behave = FAILURES[failure]
        async with running.chat() as response:
            assert response.status == 200
            assert await response.read() == WHOLE
        assert "site=iad1" in response.headers["x-pilotlight-route"]
        assert "tries=2" in response.headers["x-pilotlight-route"]
        assert len(fakes[0].bodies) == 1
        assert fakes[0].bodies == fakes[1].bodies
    assert fakes[0].active == 0


@pytest.mark.parametrize("behaviour", [hang, raw_stream(end="hang"), raw_stream(b"data: ", end="hang")])
async def test_a_silent_site_is_left_for_the_next(behaviour: Behaviour) -> None:
    async with (
        sites("ams1", "iad1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1"), first_byte_timeout_s=0.1) as running,
    ):
        fakes[0].behave = behaviour
        async with running.chat() as response:
            assert await response.read() == WHOLE
        await running.until(lambda: fakes[0].active == 0)
        assert fakes[0].cancelled == 1


@pytest.mark.parametrize("wants_stream", [True, False])
async def test_a_frozen_site_is_left_as_soon_as_its_probes_fail(wants_stream: bool) -> None:
    async with (
        sites("ams1", "iad1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1"), first_byte_timeout_s=60) as running,
    ):
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
    async with (
        sites("ams1", "iad1", "sin1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1", "sin1"), first_byte_timeout_s=60) as running,
    ):
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


async def test_a_site_that_came_back_while_another_one_froze_is_asked() -> None:
    async with (
        sites("ams1", "iad1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1"), first_byte_timeout_s=60) as running,
    ):
        fakes[1].status_body = b"frozen"
        await running.until_states(iad1="unhealthy")
        fakes[0].behave = hang
        waiting = asyncio.ensure_future(running.chat().__aenter__())
        await fakes[0].asked.wait()
        fakes[1].status_body = None
        await running.until_states(iad1="healthy")
        fakes[0].status_body = b"frozen"
        response = await waiting
        assert "site=iad1" in response.headers["x-pilotlight-route"]
        assert await response.read() == WHOLE
        response.close()


async def test_a_drain_that_finds_a_client_still_sending_its_body_does_not_forward_it() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{")
        await running.until(lambda: running.counted("pilotlight_router_open_requests") == 1)
        drain = asyncio.ensure_future(running.proxy.drain(0.0))
        await asyncio.sleep(0)
        writer.write(b"}")
        assert b" 503 " in await reader.readline()
        writer.close()
        await drain
        assert fakes[0].bodies == []


async def test_a_site_that_only_sends_heartbeats_is_at_work_and_the_client_is_told_so() -> None:
    async with sites("ams1") as fakes, router(fakes, first_byte_timeout_s=0.1) as running:
        fakes[0].behave = raw_stream(b": keep-alive\n\n", end="on command")
        async with running.chat() as response:
            assert await response.content.readany() == b": keep-alive\n\n"
            fakes[0].go_on.set()
            assert await response.read() == event(99) + DONE


async def test_refused_connections_make_a_site_unhealthy_before_any_probe_does() -> None:
    async with (
        sites("ams1", "iad1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1"), probe_interval_s=300) as running,
    ):
        await fakes[0].stop()
        for _ in range(2):
            async with running.chat() as response:
                assert await response.read() == WHOLE
        assert running.proxy.backends["ams1"].state == "unhealthy"
        async with running.chat() as response:
            assert "tries=1" in response.headers["x-pilotlight-route"]


async def test_a_whole_answer_lost_half_way_is_made_good_elsewhere() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
        fakes[0].behave = half_of_a_json_answer
        fakes[1].behave = answer(200, {"id": "whole"})
        async with running.chat(stream=False) as response:
            assert await response.json() == {"id": "whole"}


async def test_a_whole_answer_too_large_to_hold_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_router.upstream.MAX_ANSWER_BYTES", 1 << 20)
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"text": "x" * (1 << 20)})
        async with running.chat(stream=False) as response:
            assert response.status == 503
            assert "larger than 1 MiB" in (await response.json())["error"]["message"]


async def test_a_connection_is_not_tried_at_more_sites_than_allowed() -> None:
    async with (
        sites("ams1", "iad1", "sin1") as fakes,
        router(fakes, policy=FirstThen("ams1", "iad1", "sin1"), max_tries=2) as running,
    ):
        fakes[0].behave = fakes[1].behave = answer(503, DRAINING, retry_after="7")
        async with running.chat() as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "7"
            error = (await response.json())["error"]
        assert error["code"] == "no_site_available"
        assert "ams1: it answered 503 (the site drains); iad1: it answered 503" in error["message"]
        assert fakes[2].bodies == []


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 429, 500])
async def test_what_is_the_clients_own_affair_passes_through_untouched(status: int) -> None:
    body = {"error": {"message": "no", "code": "model_not_found"}}
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
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
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
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


async def test_a_stream_that_dribbles_byte_by_byte_arrives_whole() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        text = event(0).replace(b"\n", b"\r\n") + b": note\n\n" + event(1) + DONE
        fakes[0].behave = raw_stream(*(text[i : i + 1] for i in range(len(text))))
        async with running.chat() as response:
            assert await response.read() == text


async def test_a_sites_own_error_event_is_the_end_and_nothing_is_added() -> None:
    failed = b'data: {"error": {"message": "engine died", "code": "engine_error"}}\n\n'
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), failed)
        async with running.chat() as response:
            assert await response.read() == event(0) + failed


async def test_a_site_that_keeps_talking_after_the_end_is_cut_off() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0) + DONE, end="hang")
        async with running.chat() as response:
            assert await response.read() == event(0) + DONE
        await running.until(lambda: fakes[0].active == 0)


async def test_a_client_that_leaves_before_the_first_byte_closes_the_upstream() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = hang
        waiting = asyncio.ensure_future(
            running.http.post(running.url + "/v1/chat/completions", json={"model": "ember"})
        )
        await fakes[0].asked.wait()
        assert running.proxy.backends["ams1"].outstanding == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.until(lambda: fakes[0].cancelled == 1)
        await running.until(
            lambda: running.counted("pilotlight_router_requests_total", site="", outcome="client_gone") == 1
        )


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
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
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
            while before != written:  # until nothing moves any more
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
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n{")
        assert b" 413 " in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
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
        assert (headers["accept-encoding"], headers["authorization"]) == ("identity", "Bearer t")


async def test_a_router_that_is_its_own_site_is_stopped_after_a_few_hops() -> None:
    fake = FakeSite("ams1")
    await fake.start()
    async with router([fake], policy=NearestPolicy()) as running:
        backend = running.proxy.backends["ams1"]
        backend.url = running.url
        async with running.chat() as response:
            assert response.status == 400
            assert "passed 4 routers" in (await response.json())["error"]["message"]
        backend.url = fake.url
    await fake.stop()


async def test_a_session_sticks_to_its_site_survives_its_loss_and_stays_at_the_new_one() -> None:
    async with sites("ams1", "iad1", "sin1") as fakes, router(fakes) as running:
        headers = {"x-session-affinity": "conversation-1"}

        async def turn(text: str) -> str:
            async with running.chat(headers=headers, messages=[{"role": "user", "content": text}]) as response:
                assert await response.read() == WHOLE
            return response.headers["x-pilotlight-route"].split("; ")[0].removeprefix("site=")

        homes = {await turn(f"turn {i}") for i in range(6)}
        assert len(homes) == 1
        home = next(fake for fake in fakes if fake.name in homes)
        await home.stop()
        refuges = {await turn(f"turn {i}") for i in range(6, 12)}
        assert len(refuges) == 1
        assert home.name not in refuges
        await home.start()
        await running.until_states(**{home.name: "healthy"})
        assert {await turn("again")} == refuges


async def test_a_follow_up_without_a_header_finds_its_home() -> None:
    async with sites("ams1", "iad1", "sin1") as fakes, router(fakes) as running:
        messages = [{"role": "user", "content": "Tell me about airports. " * 50}]
        async with running.chat(messages=messages) as response:
            await response.read()
        first = response.headers["x-pilotlight-route"]
        messages += [{"role": "assistant", "content": "There are many."}, {"role": "user", "content": "More"}]
        async with running.chat(messages=messages) as response:
            await response.read()
        second = response.headers["x-pilotlight-route"]
        assert second.endswith("reason=home")
        assert first.split("; ")[0] == second.split("; ")[0]


async def test_a_request_goes_to_the_site_that_has_its_model() -> None:
    async with sites("ams1", "iad1") as fakes:
        fakes[1].status_fields = {"models": (model_status("big", aliases=("@org/big",)),)}
        async with router(fakes) as running:
            for model in ("big", "@org/big"):
                async with running.chat(model=model) as response:
                    assert "site=iad1" in response.headers["x-pilotlight-route"]
            fakes[0].behave = fakes[1].behave = answer(404, {"error": {"code": "model_not_found"}})
            async with running.chat(model="nobody-has-it") as response:
                assert response.status == 404


async def test_requests_spread_over_sites_while_they_are_under_way() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=LeastOutstandingPolicy()) as running:
        fakes[0].behave = fakes[1].behave = raw_stream(event(0), end="on command")
        responses = [await running.chat() for _ in range(4)]
        assert [fake.active for fake in fakes] == [2, 2]
        for fake in fakes:
            fake.go_on.set()
        for response in responses:
            assert (await response.read()).endswith(DONE)
            response.close()


async def test_with_no_healthy_site_the_unhealthy_are_asked_and_the_refusal_says_what_came_of_it() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        fakes[0].status_fields = {"draining": True}
        await fakes[1].stop()
        await running.until_states(ams1="draining", iad1="unhealthy")
        async with running.chat() as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            message = (await response.json())["error"]["message"]
        assert "tried iad1: cannot connect" in message
        async with running.chat("/client/v4/accounts/a/ai/run/ember") as response:
            assert (response.status, (await response.json())["errors"][0]["code"]) == (429, 3040)


async def test_a_site_that_refuses_because_it_drains_is_left_alone_until_it_says_otherwise() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=FirstThen("ams1", "iad1")) as running:
        fakes[0].behave = answer(503, DRAINING)
        fakes[0].status_fields = {"draining": True}
        async with running.chat() as response:
            assert "site=iad1" in response.headers["x-pilotlight-route"]
        assert running.proxy.backends["ams1"].state == "draining"
        fakes[0].status_fields = {}
        await running.until_states(ams1="healthy")


async def test_a_drain_lets_streams_finish_refuses_new_ones_and_tells_those_it_cuts() -> None:
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
        running.proxy.is_draining = False
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
            "decode_crowding",
            "doubt",
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


async def test_a_site_whose_status_flaps_still_gets_every_request_answered() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        for i in range(30):
            fakes[0].status_body = b"not a status" if i % 2 else None
            async with running.chat() as response:
                assert await response.read() == WHOLE
            await asyncio.sleep(0.02)


async def test_many_streams_at_once_each_get_their_own_bytes() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        for fake in fakes:
            fake.behave = stream_of(50)

        async def one(i: int) -> bytes:
            async with running.chat(messages=[{"role": "user", "content": f"stream {i}"}]) as response:
                return await response.read()

        expected = b"".join(event(i) for i in range(50)) + DONE
        assert set(await asyncio.gather(*(one(i) for i in range(40)))) == {expected}


async def half_of_a_json_answer(site: FakeSite, request: Any) -> Any:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "500"})
    await response.prepare(request)
    await response.write(b'{"id": "ha')
    await asyncio.sleep(0.02)
    reset_connection(request)
    return response


async def late_end(site: FakeSite, request: web.Request) -> web.StreamResponse:
    """The last chunk of the body follows the last event in a packet of its own."""
    response = await begin(request)
    await response.write(DONE)
    await asyncio.sleep(0.03)
    return response


async def parts(data: bytes) -> Any:
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]
