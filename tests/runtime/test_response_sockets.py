"""Responses over WebSockets, at a real server: the events of a stream, continuations, lanes, refusals and a client that leaves."""

from typing import Any

import aiohttp
import pytest

from tests.asgi import call, eventually
from tests.fakes import TOKENIZER, says
from tests.runtime.conftest import Site, SiteMaker

pytestmark = pytest.mark.process

PATH = "/v1/responses"
ENDLESS = [*says("Hello", finish=None), 600.0]
Events = list[dict[str, Any]]


class Client:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, **fields: Any) -> None:
        await self.socket.send_json({"type": "response.create", "model": "tiny", **fields})

    async def until_end(self) -> Events:
        """Return the events up to the end of a response."""
        events: Events = []
        while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
            events.append(await self.socket.receive_json(timeout=60))
        return events

    async def ask(self, **fields: Any) -> Events:
        await self.send(**fields)
        return await self.until_end()


def connected(session: aiohttp.ClientSession, site: Site) -> Any:
    return session.ws_connect(site.url + PATH, max_msg_size=0)


def prompts(site: Site) -> list[str]:
    return [TOKENIZER.decode(each.prompt_token_ids, skip_special_tokens=False) for each in site.engine.submits]


async def test_a_message_gets_the_events_of_a_stream(server: Site) -> None:
    streamed = await call(server.app, PATH, {"model": "tiny", "input": "Hi", "stream": True})
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        events = await Client(socket).ask(input="Hi")
    assert [event["type"] for event in events] == [event["type"] for event in streamed.events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    stored = (await call(server.app, f"{PATH}/{events[-1]['response']['id']}")).json
    assert stored["output"] == events[-1]["response"]["output"]


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_response_is_continued_by_its_id_whether_it_is_stored_or_not(server: Site, is_stored: bool) -> None:
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        client, before = Client(socket), None
        for turn, given in enumerate(("One", [{"role": "user", "content": "Two"}], "Three")):
            server.engine.script = says(f"Answer {turn}")
            lane = {"stream_id": "b"} if turn == 2 else {}
            events = await client.ask(input=given, previous_response_id=before, store=is_stored, **lane)
            told = events[-1]["response"]
            assert (told["previous_response_id"], told["store"]) == (before, is_stored)
            assert {event.get("stream_id") for event in events} == {lane.get("stream_id")}
            before = told["id"]
    last = prompts(server)[-1]
    places = [last.index(text) for text in ("One", "Answer 0", "Two", "Answer 1", "Three")]
    assert places == sorted(places)
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        (*_, last_event) = await Client(socket).ask(input="Four", previous_response_id=before)
        found = last_event["type"] == "response.completed"
        assert found is is_stored
        assert found or (last_event["status"], last_event["error"]["code"]) == (400, "previous_response_not_found")


async def test_what_is_not_stored_continues_what_is_stored_with_all_of_it(server: Site) -> None:
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        client, names = Client(socket), list[str | None]([None])
        kinds: list[dict[str, Any]] = [{}, {"store": False}, {"generate": False}, {"store": False}, {}]
        for turn, kind in enumerate(kinds):
            events = await client.ask(input=f"Turn {turn}", previous_response_id=names[-1], **kind)
            assert {event["response"]["previous_response_id"] for event in (events[0], events[-1])} == {names[-1]}
            names.append(events[-1]["response"]["id"])
        last = prompts(server)[-1]
        places = [last.index(f"Turn {turn}") for turn in range(len(kinds))]
        assert places == sorted(places)
        assert last.count("Turn") == len(kinds)
        await call(server.app, f"{PATH}/{names[1]}", method="DELETE")
        error = (await client.ask(input="More", previous_response_id=names[-2]))[-1]["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_prompt_can_be_computed_before_its_answer_is_requested(server: Site) -> None:
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        client = Client(socket)
        events = await client.ask(input="One", generate=False)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        response = events[-1]["response"]
        assert (response["status"], response["output"]) == ("completed", [])
        (*_, last) = await client.ask(input="Two", previous_response_id=response["id"])
        assert last["response"]["output"]
    first, second = prompts(server)
    assert 0 < second.index("One") < second.index("Two")
    assert server.engine.submits[0].sampling.max_tokens == 1
    assert "One" in first


async def test_lanes_are_answered_at_the_same_time_and_each_in_turn(make_server: SiteMaker) -> None:
    async with make_server() as site, aiohttp.ClientSession() as session, connected(session, site) as socket:
        client = Client(socket)
        site.engine.script = ENDLESS
        await client.send(input="long", stream_id="a")
        await client.send(input="waits", stream_id="a")
        assert (await socket.receive_json(timeout=60))["stream_id"] == "a"
        await client.send(input="also long", stream_id="b")
        while (await socket.receive_json(timeout=60))["stream_id"] != "b":
            continue
        assert len(site.engine.submits) == 2
    await eventually(lambda: not site.engine.open)
    assert len(site.engine.submits) == 2


@pytest.mark.parametrize(
    ("message", "status", "sentence"),
    [
        ("nonsense", 400, "a message must be a JSON object"),
        ("[1]", 400, "a message must be a JSON object"),
        ('{"type": "response.steer"}', 400, "only 'response.create' is supported"),
        ('{"type": 7}', 400, "only 'response.create' is supported"),
        ('{"type": "response.create", "model": "tiny", "background": true, "input": "x"}', 400, "over WebSockets"),
        ('{"type": "response.create", "model": "nope", "input": "x"}', 404, "no model named"),
        ('{"type": "response.create", "model": "tiny", "input": []}', 400, "input: must not be empty"),
        ('{"type": "response.create", "model": "tiny", "input": 7, "stream_id": 7}', 400, "input"),
        ('{"type": "response.create", "model": "tiny"}', 400, "input"),
    ],
)
async def test_a_message_that_is_refused_ends_no_connection(
    server: Site, message: str, status: int, sentence: str
) -> None:
    async with aiohttp.ClientSession() as session, connected(session, server) as socket:
        await socket.send_str(message)
        told = await socket.receive_json(timeout=60)
        assert (told["type"], told["status"]) == ("error", status)
        assert sentence in told["error"]["message"]
        assert (await Client(socket).ask(input="Hi"))[-1]["type"] == "response.completed"


async def test_more_requests_than_may_wait_are_refused(make_server: SiteMaker) -> None:
    async with make_server() as site, aiohttp.ClientSession() as session, connected(session, site) as socket:
        site.engine.script = ENDLESS
        for _ in range(33):
            await Client(socket).send(input="x")
        while (told := await socket.receive_json(timeout=60))["type"] != "error":
            continue
        assert told["status"] == 429


async def test_a_server_that_stops_closes_them_with_a_code_for_a_new_connection(make_server: SiteMaker) -> None:
    async with make_server() as site, aiohttp.ClientSession() as session, connected(session, site) as socket:
        assert (await Client(socket).ask(input="Hi"))[-1]["type"] == "response.completed"
        site.stop.set()
        await socket.receive(timeout=60)
        assert socket.close_code == 1012
