"""OpenAI's Responses at a site: whole and streamed, tools, reasoning, formats, stored and background responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Constraint
from pilotlight.response_store.response_rows import ResponseRow
from pilotlight.wire.sse import EventDecoder
from tests.asgi import call, eventually, start
from tests.fakes import CHATML, FakeEngineClient, FakeLauncher, ids, says
from tests.response_store.hindered import HinderedDatabase
from tests.runtime.conftest import Site, SiteMaker

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "tiny", "input": "Hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLED = 'Ok. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CHAT_PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def events_of(body: bytes) -> list[dict[str, Any]]:
    events = [event for event in EventDecoder().feed(body) if event.data is not None]
    told = [json.loads(event.data or b"") for event in events]
    assert [(event.name or b"").decode() for event in events] == [fields["type"] for fields in told]
    return told


async def streamed(site: Site, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await call(site.app, PATH, {**body, "stream": True})
    assert answer.status == 200, answer.body
    told = events_of(answer.body)
    assert [fields["sequence_number"] for fields in told] == list(range(len(told)))
    return told


async def test_an_answer_is_a_response_that_repeats_the_request(site: Site) -> None:
    site.engine.script = says("Hello", cached=2)
    asked = {**HELLO, "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 40}
    body = (await call(site.app, PATH, asked)).json
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["store"], body["error"]) == ("response", "completed", True, None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert (body["usage"]["output_tokens"], body["usage"]["total_tokens"]) == (6, body["usage"]["input_tokens"] + 6)
    assert {name: body[name] for name in ("instructions", "metadata", "temperature", "max_output_tokens")} == {
        name: asked[name] for name in ("instructions", "metadata", "temperature", "max_output_tokens")
    }
    submit = site.engine.submits[0]
    assert submit.prompt_token_ids == ids("<|im_start|>system\nBe brief.<|im_end|>\n" + CHAT_PROMPT)
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (40, 0.5)


@pytest.mark.process
async def test_a_stream_has_every_event_in_its_order(make_site: SiteMaker, model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text(CHATML + "{# <think> <tool_call> #}")
    async with make_site() as site:
        site.engine.script = says("<think>\nHm.\n</think>\n\n" + CALLED, per_step=200)
        events = await streamed(site, {**HELLO, "tools": [TOOL]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert done == final["output"]
    reasoning, message, called = done
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert message["content"][0]["text"] == "Ok."
    assert (called["type"], called["name"], called["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    by_item = {event["item_id"] for event in events if "item_id" in event}
    assert by_item == {item["id"] for item in done}


async def test_an_answer_that_is_cut_is_incomplete_and_says_why(site: Site) -> None:
    site.engine.script = says("Hello", finish="length")
    body = (await call(site.app, PATH, {**HELLO, "max_output_tokens": 5})).json
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    events = await streamed(site, {**HELLO, "max_output_tokens": 5})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


@pytest.mark.process
async def test_items_reach_the_template_as_a_chats_messages_do(site: Site) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Ok.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
    ]  # fmt: skip
    calls = [("c1", '{"a": 1}'), ("c2", "{}")]
    chat = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm.",
         "tool_calls": [{"id": i, "type": "function", "function": {"name": "f", "arguments": a}} for i, a in calls]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"}, {"role": "tool", "content": "8", "tool_call_id": "c2"},
    ]  # fmt: skip
    answer = await call(site.app, PATH, {**HELLO, "input": items, "tools": [TOOL], "store": False})
    assert answer.status == 200, answer.body
    function = {"name": "f", "parameters": TOOL["parameters"]}
    tools = [{"type": "function", "function": function}]
    await call(site.app, "/v1/chat/completions", {"model": "tiny", "messages": chat, "tools": tools})
    mine, theirs = site.engine.submits
    assert mine.prompt_token_ids == theirs.prompt_token_ids


@pytest.mark.process
async def test_the_form_of_an_answer_and_the_choice_of_a_tool_are_enforced(site: Site) -> None:
    schema = TOOL["parameters"]
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    await call(site.app, PATH, {**HELLO, "text": {"format": form}})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    for choice in ("required", {"type": "function", "name": "f"}, allowed):
        answer = await call(site.app, PATH, {**HELLO, "tools": [TOOL, {**TOOL, "name": "g"}], "tool_choice": choice})
        assert answer.status == 200, answer.body
    first, *others = [submit.constraint for submit in site.engine.submits]
    assert first == Constraint("json_schema", json.dumps(schema, separators=(",", ":")))
    assert all(others)
    assert others[1] == others[2] != others[0]


@pytest.mark.parametrize(
    ("fields", "word", "param"),
    [
        ({"model": "nope"}, "model_not_found", "model"),
        ({"input": None}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "invalid_request", "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "unsupported_parameter", "input[0].content[0].file_id"),
        ({"input": [{"type": "song", "id": "a"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_gone"}]}, "not_found", "input[0]"),
        ({"input": [{"role": "boss", "content": "x"}]}, "invalid_request", "input[0].role"),
        ({"input": "x" * 600}, "context_length_exceeded", "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "invalid_request", "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "invalid_request", "tools[0].format"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "invalid_request", "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": "some"}, "invalid_request", "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_request", "text.format"),
        ({"max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
        ({"truncation": "some"}, "invalid_request", "truncation"),
        ({"previous_response_id": "resp_gone"}, "not_found", "previous_response_id"),
        ({"previous_response_id": 5}, "invalid_request", "previous_response_id"),
        ({"background": True, "store": False}, "invalid_request", "background"),
        ({"top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"prompt": {"id": "p"}}, "invalid_request", "prompt"),
        ({"conversation": "c"}, "invalid_request", "conversation"),
        ({"previous_response_id": "conv_1"}, "invalid_request", "previous_response_id"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(site: Site, fields: dict[str, Any], word: str, param: str | None) -> None:
    answer = await call(site.app, PATH, {**HELLO, **fields})
    assert answer.status in (400, 404)
    assert answer.json["error"]["code"] == word, answer.body
    if param is not None:
        assert answer.json["error"]["param"] == param
    assert (await call(site.app, PATH, HELLO)).status == 200


async def test_a_response_continues_another_however_that_was_sent(site: Site) -> None:
    site.engine.script = says("Hello")
    first = (await call(site.app, PATH, {**HELLO, "instructions": "Not carried on."})).json
    second = events_of(
        (await call(site.app, PATH, {**HELLO, "previous_response_id": first["id"], "stream": True})).body
    )
    final = second[-1]["response"]
    assert (final["previous_response_id"], final["id"]) == (first["id"], second[0]["response"]["id"])
    await call(site.app, PATH, {**HELLO, "previous_response_id": final["id"]})
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert site.engine.submits[-1].prompt_token_ids == ids(turn * 2 + CHAT_PROMPT)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    said = {"role": "user", "content": "Hi"}
    await call(site.app, PATH, {**HELLO, "input": [said, reference, said]})
    assert site.engine.submits[-1].prompt_token_ids == ids(turn + CHAT_PROMPT)


@pytest.mark.process
async def test_logprobs_of_the_text_alone_are_part_of_it_where_they_are_included(
    make_site: SiteMaker, model_directory: Path
) -> None:
    (model_directory / "chat_template.jinja").write_text(CHATML + "{# <think> <tool_call> #}")
    async with make_site() as site:
        site.engine.script = says("<think>\nHm.\n</think>\n\n" + CALLED, logprobs=True, per_step=5)
        asked = {**HELLO, "tools": [TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = (await call(site.app, PATH, asked)).json
        events = await streamed(site, asked)
        none = (await call(site.app, PATH, {**HELLO, "tools": [TOOL]})).json
    told = next(item for item in whole["output"] if item["type"] == "message")["content"][0]["logprobs"]
    assert "".join(each["token"] for each in told).strip() == "Ok."
    assert bytes(told[0]["bytes"]).decode() == told[0]["token"]
    assert (told[0]["logprob"], len(told[0]["top_logprobs"])) == (-0.5, 2)
    deltas = [each for event in events for each in event.get("logprobs", ()) if event["type"].endswith("text.delta")]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert deltas == done["logprobs"]
    assert [each["token"] for each in deltas] == [each["token"] for each in told]
    assert next(item for item in none["output"] if item["type"] == "message")["content"][0]["logprobs"] == []


async def test_items_are_listed_in_the_references_shape(site: Site) -> None:
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    made = (await call(site.app, PATH, {**HELLO, "input": said})).json
    items = (await call(site.app, f"{PATH}/{made['id']}/input_items?order=asc")).json["data"]
    assert [item["type"] for item in items] == ["message"] * 3
    assert all(item["id"] for item in items)
    assert [item["content"] for item in items] == [
        [{"type": "input_text", "text": "Hi"}],
        [{"type": "output_text", "text": "Ho", "annotations": []}],
        [{"type": "input_text", "text": "So?"}],
    ]


@pytest.mark.process
async def test_the_tokens_of_a_prompt_are_counted_with_the_conversation_that_is_kept(site: Site) -> None:
    counted = (
        await call(site.app, f"{PATH}/input_tokens", {**HELLO, "tools": [TOOL], "instructions": "Be brief."})
    ).json
    made = (await call(site.app, PATH, {**HELLO, "tools": [TOOL], "instructions": "Be brief."})).json
    assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    again = {"model": "tiny", "previous_response_id": made["id"]}
    counted = (await call(site.app, f"{PATH}/input_tokens", {**again, "input": "So?"})).json
    assert (
        counted["input_tokens"] == (await call(site.app, PATH, {**again, "input": "So?"})).json["usage"]["input_tokens"]
    )
    assert (await call(site.app, f"{PATH}/input_tokens", again)).json["input_tokens"] < counted["input_tokens"]
    for body, param in (
        ({"model": "tiny"}, "input"),
        ({"model": "nope", "input": "Hi"}, "model"),
        ({"input": "Hi"}, "model"),
    ):
        refused = await call(site.app, f"{PATH}/input_tokens", body)
        assert (refused.status, refused.json["error"]["param"]) == (404 if body.get("model") == "nope" else 400, param)
    assert len(site.engine.submits) == 2
    compacted = await call(site.app, f"{PATH}/compact", HELLO)
    assert (compacted.status, compacted.json["error"]["code"]) == (501, "not_implemented")


async def test_a_response_is_read_listed_and_deleted_by_its_tenant_alone(site: Site) -> None:
    mine = {"authorization": "Bearer mine"}
    body = (await call(site.app, PATH, HELLO, **mine)).json
    one = f"{PATH}/{body['id']}"
    assert (await call(site.app, one, **mine)).json == body
    items = (await call(site.app, f"{one}/input_items", **mine)).json
    assert [item["content"] for item in items["data"]] == [[{"type": "input_text", "text": "Hi"}]]
    assert items["first_id"] == items["last_id"] == items["data"][0]["id"]
    for headers in ({}, {"authorization": "Bearer another"}):
        other = await call(site.app, one, **headers)
        assert (other.status, other.json["error"]["code"]) == (404, "not_found")
        assert (await call(site.app, PATH, {**HELLO, "previous_response_id": body["id"]}, **headers)).status == 404
        assert (await call(site.app, one, method="DELETE", **headers)).status == 404
    deleted = await call(site.app, one, method="DELETE", **mine)
    assert deleted.json == {"id": body["id"], "object": "response", "deleted": True}
    assert (await call(site.app, one, **mine)).status == 404
    unkept = (await call(site.app, PATH, {**HELLO, "store": False}, **mine)).json
    assert (unkept["store"], (await call(site.app, f"{PATH}/{unkept['id']}", **mine)).status) == (False, 404)


async def test_a_background_response_is_made_without_its_client(site: Site) -> None:
    goes_on = asyncio.Event()
    site.engine.script = [*says("Hello")[:2], goes_on, *says("Hello")[2:]]
    started = (await call(site.app, PATH, {**HELLO, "background": True})).json
    assert started["background"] is True
    assert started["status"] in ("queued", "in_progress")
    one = f"{PATH}/{started['id']}"
    early = await call(site.app, PATH, {**HELLO, "previous_response_id": started["id"]})
    assert early.json["error"]["code"] == "conflict"
    goes_on.set()
    while (made := (await call(site.app, one)).json)["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0)
    assert (made["status"], made["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    events = events_of((await call(site.app, f"{one}?stream=true")).body)
    assert events[0]["response"]["id"] == events[-1]["response"]["id"] == started["id"]
    rest = events_of((await call(site.app, f"{one}?stream=true&starting_after=3")).body)
    assert rest == events[4:]


async def test_a_background_response_is_streamed_and_cancelled(site: Site) -> None:
    site.engine.script = [*says("Hello")[:2], asyncio.Event()]
    exchange = start(site.app, PATH, {**HELLO, "background": True, "stream": True})
    await eventually(lambda: b"response.created" in exchange.body)
    response_id = events_of(exchange.body.partition(b"\n\n")[0] + b"\n\n")[0]["response"]["id"]
    cancelled = await call(site.app, f"{PATH}/{response_id}/cancel", {})
    assert cancelled.json["status"] == "cancelled"
    await exchange.done()
    assert not site.engine.open
    events = events_of(exchange.body)
    assert (events[-1]["type"], events[-1]["code"], events[-1]["sequence_number"]) == (
        "error",
        "aborted",
        len(events) - 1,
    )
    again = await call(site.app, f"{PATH}/{response_id}?stream=true")
    assert events_of(again.body) == events


async def test_a_background_response_that_is_refused_says_so_at_once(site: Site) -> None:
    answer = await call(site.app, PATH, {**HELLO, "background": True, "temperature": 9})
    assert (answer.status, answer.json["error"]["param"]) == (400, "temperature")


async def test_only_a_background_response_can_be_cancelled(site: Site) -> None:
    body = (await call(site.app, PATH, HELLO)).json
    answer = await call(site.app, f"{PATH}/{body['id']}/cancel", {})
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")


async def test_only_a_background_response_can_be_streamed_again(site: Site) -> None:
    body = (await call(site.app, PATH, HELLO)).json
    answer = await call(site.app, f"{PATH}/{body['id']}?stream=true")
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")


async def test_responses_of_all_kinds_are_there_after_a_restart(make_site: SiteMaker) -> None:
    mine = {"authorization": "Bearer mine"}
    async with make_site() as site:
        site.engine.script = says("Hello")
        first = (await call(site.app, PATH, HELLO, **mine)).json
        streamed = events_of((await call(site.app, PATH, {**HELLO, "stream": True}, **mine)).body)[-1]["response"]
        started = (await call(site.app, PATH, {**HELLO, "background": True}, **mine)).json
        one = f"{PATH}/{started['id']}"
        told = events_of((await call(site.app, f"{one}?stream=true", **mine)).body)
        items = (await call(site.app, f"{PATH}/{first['id']}/input_items", **mine)).json
    async with make_site() as site:
        for kept in (first, streamed):
            assert (await call(site.app, f"{PATH}/{kept['id']}", **mine)).json == kept
            assert (await call(site.app, f"{PATH}/{kept['id']}")).status == 404
        assert (await call(site.app, one, **mine)).json == told[-1]["response"]
        assert events_of((await call(site.app, f"{one}?stream=true", **mine)).body) == told
        assert events_of((await call(site.app, f"{one}?stream=true&starting_after=3", **mine)).body) == told[4:]
        assert (await call(site.app, f"{one}?stream=true&starting_after={len(told)}", **mine)).body == b""
        assert (await call(site.app, f"{PATH}/{first['id']}/input_items", **mine)).json == items
        assert (await call(site.app, f"{one}/cancel", {}, **mine)).json == told[-1]["response"]
        await call(site.app, PATH, {**HELLO, "previous_response_id": first["id"]}, **mine)
        turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        assert site.engine.submits[-1].prompt_token_ids == ids(turn + CHAT_PROMPT)
        assert (await call(site.app, f"{PATH}/{first['id']}", method="DELETE", **mine)).status == 200
    async with make_site() as site:
        assert (await call(site.app, f"{PATH}/{first['id']}", **mine)).status == 404


async def test_a_response_whose_site_stops_is_found_as_failed_and_its_reader_gets_an_error(
    make_site: SiteMaker,
) -> None:
    async with make_site() as site:
        site.engine.script = [*says("Hello")[:2], asyncio.Event()]
        started = (await call(site.app, PATH, {**HELLO, "background": True})).json
        reader = start(site.app, f"{PATH}/{started['id']}?stream=true", method="GET")
        await eventually(lambda: b"output_text.delta" in reader.body)
        await site.app.responses.keeping.close()
        await reader.done()
    async with make_site() as site:
        one = f"{PATH}/{started['id']}"
        failed = (await call(site.app, one)).json
        assert (failed["status"], failed["error"]["code"]) == ("failed", "aborted")
        told = events_of((await call(site.app, f"{one}?stream=true")).body)
        assert told == events_of(reader.body)
        assert (told[-1]["type"], told[-1]["response"]) == ("response.failed", failed)


@pytest.fixture
async def without_room(make_site: SiteMaker, tmp_path: Path) -> AsyncIterator[Site]:
    """Make a site whose directory for responses is replaced by a file after the start."""
    directory = tmp_path / "responses"
    async with make_site(responses={"directory": str(directory)}) as site:
        directory.rmdir()
        directory.write_bytes(b"")
        yield site


async def test_a_response_that_cannot_be_kept_says_so_and_is_answered(without_room: Site) -> None:
    site = without_room
    site.engine.script = says("Hello")
    body = (await call(site.app, PATH, HELLO)).json
    assert (body["status"], body["store"]) == ("completed", False)
    last = (await streamed(site, HELLO))[-1]
    assert (last["type"], last["response"]["store"]) == ("response.completed", False)
    refused = await call(site.app, PATH, {**HELLO, "background": True})
    assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
    assert (await call(site.app, f"{PATH}/{body['id']}")).status == 404, "its client learnt that it is not stored"
    assert (await call(site.app, f"{PATH}/resp_another")).status == 503
    await eventually(lambda: not site.engine.open)


async def test_where_none_is_kept_a_background_response_is_refused_by_name(make_site: SiteMaker) -> None:
    async with make_site(responses={"max_gib": 0}) as site:
        site.engine.script = says("Hello")
        body = (await call(site.app, PATH, HELLO)).json
        assert (body["store"], (await call(site.app, f"{PATH}/{body['id']}")).status) == (False, 404)
        refused = await call(site.app, PATH, {**HELLO, "background": True})
        assert (refused.status, refused.json["error"]["param"]) == (400, "background")


def slow_writes(site: Site) -> asyncio.Event:
    """Make the store wait with its writes until the returned event is set."""
    store, is_set = site.app.responses.keeping.store, asyncio.Event()

    async def wait(rows: list[ResponseRow]) -> None:
        await is_set.wait()

    store.database = HinderedDatabase(store.database, wait)
    return is_set


async def test_nothing_that_was_said_waits_for_the_disk(site: Site) -> None:
    writes = slow_writes(site)
    site.engine.script = says("Hello", per_step=200)
    exchange = start(site.app, PATH, {**HELLO, "stream": True})
    await eventually(lambda: b"response.output_item.done" in exchange.body)
    assert b"response.completed" not in exchange.body
    writes.set()
    await exchange.done()
    last = events_of(exchange.body)[-1]
    assert (last["type"], last["response"]["store"]) == ("response.completed", True)


async def test_no_client_learns_of_a_background_response_that_could_be_lost(site: Site) -> None:
    store = site.app.responses.keeping.store
    store.timings = store.timings._replace(refused_within_s=0.01)
    writes = slow_writes(site)
    site.engine.script = says("Hello")
    exchange = start(site.app, PATH, {**HELLO, "background": True})
    await asyncio.sleep(0.1)
    was_told, was_started = exchange.is_started, bool(site.engine.submits)
    writes.set()
    assert (was_told, was_started) == (False, False)
    assert (await exchange.done()).json["background"] is True
    await eventually(lambda: not site.app.responses.keeping.store._made)


async def test_a_failure_in_mid_stream_is_reported_and_nothing_is_kept(site: Site) -> None:
    site.engine.script = [*says("Hel")[:2], RuntimeError("boom")]
    events = await streamed(site, HELLO)
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "internal_error")
    response_id = events[0]["response"]["id"]
    assert (await call(site.app, f"{PATH}/{response_id}")).status == 404
    failed = (await call(site.app, PATH, {**HELLO, "background": True})).json
    while failed["status"] in ("queued", "in_progress"):
        failed = (await call(site.app, f"{PATH}/{failed['id']}")).json
    assert (failed["status"], failed["error"]["code"]) == ("failed", "internal_error")


def rendered(messages: list[dict[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return f"{turns}<|im_start|>assistant\n"


async def test_truncation_drops_the_oldest_turns_where_it_is_allowed(make_site: SiteMaker) -> None:
    def prepare(client: FakeEngineClient) -> None:
        client.context_length = 256

    turns = [{"role": "system", "content": "S"}]
    for i in range(9):
        turns += [{"role": "user", "content": f"{i}" * 20}, {"role": "assistant", "content": "ok"}]
    turns.append({"role": "user", "content": "now"})
    async with make_site(launcher=FakeLauncher(prepare)) as site:
        refused = await call(site.app, PATH, {**HELLO, "input": turns})
        assert refused.json["error"]["code"] == "context_length_exceeded"
        answer = await call(site.app, PATH, {**HELLO, "input": turns, "truncation": "auto"})
        assert (answer.status, answer.json["truncation"]) == (200, "auto")
        fitting = [ids(rendered([turns[0], *turns[i:]])) for i in range(1, len(turns), 2)]
        assert site.engine.submits[-1].prompt_token_ids == next(prompt for prompt in fitting if len(prompt) < 256)
        too_long = await call(site.app, PATH, {**HELLO, "input": "x" * 900, "truncation": "auto"})
        assert too_long.json["error"]["code"] == "context_length_exceeded"
