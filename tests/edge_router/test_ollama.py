"""Ollama's API through a router: streams of lines continue at another site, lists have all models, errors have Ollama's form."""

import json
from typing import Any

import pytest
from aiohttp import web

from pilotlight.edge_router.requests.request import Head, RequestParser
from pilotlight.wire.hop.continuation import RESUME_POINTS, ResumePoint, with_resume_point
from pilotlight.wire.sse import CONTENT_TYPE, DONE, HEARTBEAT, encode_event
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import FakeSite, answer, begin, raw_stream, refuse, routed_sites, router, sites

pytestmark = pytest.mark.process

ASKED: dict[str, Any] = {"model": "ember:latest", "messages": [{"role": "user", "content": "Hi"}]}
LINES = [b'{"message":{"content":"a"},"done":false}', b'{"message":{"content":"b"},"done":false}', b'{"done":true}']


async def test_a_stream_of_events_reaches_its_client_as_lines() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(HEARTBEAT + b"".join(map(encode_event, (*LINES, DONE))), end="half-close")
        async with running.http.post(running.url + "/api/chat", json=ASKED) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            assert (await response.read()).split(b"\n") == [*LINES, b""]
        assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="ok") == 1


async def test_a_stream_continues_at_another_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s3cret")

    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        response = await begin(request, {"content-type": CONTENT_TYPE, RESUME_POINTS: "1"})
        is_first = site.name == "ams1"
        for i in [0] if is_first else [1, 2]:
            event = encode_event(LINES[i])
            await response.write(with_resume_point(event, ResumePoint(0, (i,), "stop" if i == 2 else None)))
        if not is_first:
            await response.write(encode_event(DONE))
        elif request.transport is not None:
            request.transport.abort()
        return response

    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = fakes[1].behave = behave
        async with running.http.post(running.url + "/api/chat", json=ASKED) as response:
            assert (await response.read()).split(b"\n") == [*LINES, b""]


async def test_a_stream_that_is_lost_ends_with_an_error_on_a_line() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(encode_event(LINES[0]), end="reset")
        async with running.http.post(running.url + "/api/chat", json=ASKED) as response:
            *_, last, rest = (await response.read()).split(b"\n")
        assert (json.loads(last)["code"], rest) == ("upstream_lost", b"")


async def test_refusals_are_a_sentence() -> None:
    async with sites("ams1") as fakes, router(fakes, max_tries=1) as running:
        fakes[0].behave = refuse("overloaded")
        async with running.http.post(running.url + "/api/chat", json=ASKED) as response:
            assert (response.status, type((await response.json())["error"])) == (503, str)
        async with running.http.delete(running.url + "/api/delete", json={"model": "ember"}) as response:
            assert (response.status, "site's file" in (await response.json())["error"]) == (501, True)
        async with running.http.get(running.url + "/api/version") as response:
            assert (await response.json())["version"]
        fakes[0].behave = answer(200, {})
        async with running.http.post(running.url + "/api/nothing", json={}) as response:
            assert (response.status, type((await response.json())["error"])) == (404, str)


async def test_a_list_has_the_models_of_all_sites() -> None:
    async with sites("ams1", "iad1") as fakes:
        for fake, name in zip(fakes, ("ember", "coal"), strict=True):
            fake.status_fields = {"models": (model_status(name),)}
            fake.behave = answer(200, {"models": [{"name": name, "model": name}]})
        async with router(fakes) as running:
            for path in ("/api/tags", "/api/ps"):
                async with running.http.get(running.url + path) as response:
                    assert {each["model"] for each in (await response.json())["models"]} == {"ember", "coal"}


def parsed(path: str, fields: dict[str, Any]) -> Any:
    parser = RequestParser("", 4, lambda *_: None)
    return parser.parse(Head("POST", path, path, []), json.dumps(fields).encode(), "r", "")


def test_a_router_reads_a_body_as_its_site_does() -> None:
    request = parsed("/api/chat", {**ASKED, "options": {"num_predict": 7}})
    assert (request.model, request.wants_stream, request.most_tokens) == ("ember", True, 7)
    assert not parsed("/api/chat", {**ASKED, "stream": False}).wants_stream
    assert not parsed("/api/embed", {"model": "ember", "input": "Hi"}).wants_stream
    assert parsed("/api/show", {"name": "ember:latest"}).model == "ember"


def test_a_later_turn_begins_with_the_turns_before_it() -> None:
    turns = [{"role": "system", "content": "s"}, *ASKED["messages"]]
    first = parsed("/api/chat", {**ASKED, "messages": turns}).conversation.prefixes
    later = parsed(
        "/api/chat", {**ASKED, "messages": [*turns, {"role": "assistant", "content": "a"}]}
    ).conversation.prefixes
    assert [prefix.is_telling for prefix in first] == [False, True]
    assert later[:2] == first
    seen = {**turns[1], "images": ["aaaa"]}
    assert parsed("/api/chat", {**ASKED, "messages": [turns[0], seen]}).conversation.prefixes[1] != first[1]
    pictured = [
        parsed("/api/generate", {"model": "ember", "prompt": "?", "images": [image]}) for image in ("aaaa", "bbbb")
    ]
    assert pictured[0].conversation.prefixes[0] != pictured[1].conversation.prefixes[0]
