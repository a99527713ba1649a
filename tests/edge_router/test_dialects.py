"""A router and dialects other than OpenAI's chats: ends of streams, errors after a loss, identification of conversations."""

import json
from typing import Any

import pytest

from pilotlight.edge_router.requests.request import Head, RequestParser
from pilotlight.wire.hop.continuation import (
    RESUME_POINTS,
    ResumePoint,
    decode_answer,
    decode_delivery,
    with_resume_point,
)
from pilotlight.wire.sse import CONTENT_TYPE, EventDecoder, encode_event
from tests.edge_router.fakes import answer, begin, raw_stream, refuse, routed_sites, router, sites

pytestmark = pytest.mark.process

PATH = "/v1/messages"
ASKED = {"model": "ember", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
NAMES = ("message_start", "content_block_delta", "message_stop")


def named(name: str, **fields: Any) -> bytes:
    return encode_event(json.dumps({"type": name, **fields}).encode(), name=name)


WHOLE = b"".join(named(name) for name in NAMES)
LOST = named("error", error={"type": "api_error", "message": "the engine died", "code": "engine_error"})


async def test_a_stream_ends_with_its_dialects_last_event() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for path, body in (
            (PATH, WHOLE),
            ("/v1/responses", named("response.created", response={}) + named("response.completed", response={})),
        ):
            asked = {**ASKED, "input": "Hi", "store": False}
            # the router must not wait for anything after the last event
            fakes[0].behave = raw_stream(body, end="half-close")
            async with running.http.post(running.url + path, json=asked) as response:
                told = await response.read()
            assert [event.name for event in EventDecoder().feed(told)] == [
                event.name for event in EventDecoder().feed(body)
            ]
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 2


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/complete", "/v1/messages/batches", "/nothing"])
async def test_errors_have_anthropics_shape_for_clients_that_name_its_version(path: str) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(404, {"type": "error", "error": {"type": "not_found_error"}})
        version = {"anthropic-version": "2023-06-01"}
        async with running.http.get(running.url + path, headers=version) as response:
            told = await response.json()
            assert (response.status, told["type"], told["error"]["type"]) == (404, "error", "not_found_error")
        async with running.http.post(running.url + "/v1/chat/completions", data=b"{", headers=version) as response:
            assert (response.status, "type" in await response.json()) == (400, False)


async def test_a_stream_that_is_cut_ends_with_its_dialects_error() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for path in (PATH, "/v1/responses"):
            fakes[0].behave = raw_stream(named("message_start"), end="reset")
            async with running.http.post(running.url + path, json={**ASKED, "input": "Hi"}) as response:
                last = EventDecoder().feed(await response.read())[-1]
            fields = json.loads(last.data or b"")
            assert (last.name, fields["type"]) == (b"error", "error")
            assert (fields.get("code") or fields["error"]["code"]) == "upstream_lost"


async def test_an_error_event_of_the_sites_own_is_gone_on_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")

    def site(number: int) -> Any:
        async def behave(site: Any, request: Any) -> Any:
            _, length = decode_answer(request.headers["x-pilotlight-answer"])
            numbered = decode_delivery(site.bodies[-1][:length]).num_events if length else 0
            assert numbered == (0 if number == 0 else 7)
            response = await begin(request, {"content-type": CONTENT_TYPE, RESUME_POINTS: "1"})
            for i, name in list(enumerate(NAMES))[number : number + 1 if number == 0 else None]:
                await response.write(with_resume_point(named(name), ResumePoint(0, (i,), num_events=7)))
            if number == 0:
                await response.write(LOST)
            return response

        return behave

    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave, fakes[1].behave = site(0), site(1)
        async with running.http.post(running.url + PATH, json=ASKED) as response:
            assert await response.read() == WHOLE


async def test_refusals_are_in_the_dialects_words() -> None:
    async with sites("ams1") as fakes, router(fakes, max_tries=1) as running:
        fakes[0].behave = refuse("overloaded")
        async with running.http.post(running.url + PATH, json=ASKED) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (529, "overloaded_error")
        async with running.http.post(running.url + "/v1/responses", json={**ASKED, "input": "Hi"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_site_available")


async def test_a_key_that_came_as_x_api_key_reaches_the_site_as_a_bearers() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {})
        async with running.http.post(running.url + PATH, json=ASKED, headers={"x-api-key": "abc"}) as response:
            assert response.status == 200
        assert fakes[0].seen[0].headers["authorization"] == "Bearer abc"
        assert "x-api-key" not in fakes[0].seen[0].headers


def prefixes(path: str, fields: dict[str, Any]) -> list[bytes]:
    parser = RequestParser("", 4, lambda *_: None)
    head = Head("POST", path, path, [])
    request = parser.parse(head, json.dumps({"model": "ember", **fields}).encode(), "r", "")
    return [prefix.digest for prefix in request.conversation.prefixes]


def test_a_later_turn_begins_with_the_turns_before_it_wherever_cache_control_stands() -> None:
    label = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", **label}]
    first = {"role": "user", "content": [{"type": "text", "text": "Hi", **label}]}
    turn = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "Ok"}]
    second = [*turn, {"role": "user", "content": [{"type": "text", "text": "So?", **label}]}]
    before = prefixes(PATH, {"system": system, "messages": [first]})
    after = prefixes(PATH, {"system": system, "messages": second})
    assert before == after[: len(before)]
    assert len(after) > len(before) > 0


def test_a_responses_items_are_known_however_they_are_written() -> None:
    before = prefixes("/v1/responses", {"instructions": "Be brief.", "input": "Hi"})
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
               "content": [{"type": "output_text", "text": "Ok", "annotations": []}]}  # fmt: skip
    said = {"type": "message", "id": "item_1", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    after = prefixes(
        "/v1/responses", {"instructions": "Be brief.", "input": [said, message, {"role": "user", "content": "So?"}]}
    )
    assert before == after[: len(before)]
    assert len(after) == len(before) + 2


async def test_a_background_response_that_is_cancelled_leaves_its_site() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(
            named("response.created", response={"status": "in_progress", "output": []}), end="hang"
        )
        asked = {"model": "ember", "input": "Hi", "background": True}
        async with running.http.post(running.url + "/v1/responses", json=asked) as response:
            started = await response.json()
        assert (started["status"], started["background"]) == ("in_progress", True)
        async with running.http.post(f"{running.url}/v1/responses/{started['id']}/cancel") as response:
            assert (await response.json())["status"] == "cancelled"
        await running.until(lambda: fakes[0].active == 0)


async def test_a_conversation_that_grew_too_large_is_refused_before_its_site() -> None:
    async with sites("ams1") as fakes, router(fakes, max_body_mib=0.01) as running:
        made = {
            "id": "resp_1",
            "status": "completed",
            "output": [{"id": "msg_1", "type": "message", "content": "x" * 6000}],
        }
        fakes[0].behave = answer(200, made)
        asked = {"model": "ember", "input": "y" * 3000}
        async with running.http.post(running.url + "/v1/responses", json=asked) as response:
            assert (await response.json())["store"] is True
        again = {**asked, "previous_response_id": "resp_1"}
        async with running.http.post(running.url + "/v1/responses", json=again) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
        async with running.http.post(running.url + "/v1/responses", json={**asked, "input": "z" * 20_000}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
        assert len(fakes[0].bodies) == 1


async def test_an_input_of_too_many_things_or_of_none_is_refused_before_its_site() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        for given in (b"[" + b"1," * 200_000 + b"1]", b"[" + b"{}," * 200_000 + b"{}]", b"7", b'["Hi"]'):
            body = b'{"model": "ember", "input": ' + given + b"}"
            async with running.http.post(running.url + "/v1/responses", data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "input"
        assert not fakes[0].bodies
