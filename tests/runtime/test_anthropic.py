"""Anthropic's Messages at a site: whole and streamed, with tools and thinking, errors, token counts, and the header for keys."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pilotlight.dialects.anthropic import prompt_pieces
from pilotlight.engine.api.protocol import Constraint
from pilotlight.wire.sse import EventDecoder
from tests.asgi import call
from tests.fakes import CHATML, ids, says
from tests.runtime.conftest import Site, SiteMaker

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {
    "name": "f",
    "description": "Does it",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLED = 'Ok. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CHAT_PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def streamed(site: Site, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await call(site.app, PATH, {**body, "stream": True})
    assert answer.status == 200, answer.body
    events = [event for event in EventDecoder().feed(answer.body) if event.data is not None]
    told = [json.loads(event.data or b"") for event in events]
    assert [(event.name or b"").decode() for event in events] == [fields["type"] for fields in told]
    return told


async def test_an_answer_is_a_message_whose_usage_has_cached_tokens_apart(site: Site) -> None:
    site.engine.script = says("Hello", cached=2)
    body = (await call(site.app, PATH, HELLO)).json
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(ids(CHAT_PROMPT)) - 2, 2)
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (6, 0)
    assert site.engine.submits[0].sampling.max_tokens == 50


@pytest.mark.process
async def test_a_stream_has_every_event_in_its_order(site: Site) -> None:
    site.engine.script = says(CALLED, cached=3)
    events = await streamed(site, {**HELLO, "tools": [TOOL]})
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (events[0]["message"]["content"], events[0]["message"]["usage"]["cache_read_input_tokens"]) == ([], 3)
    starts = {event["index"]: event["content_block"] for event in events if event["type"] == "content_block_start"}
    assert starts[0] == {"type": "text", "text": ""}
    assert (starts[1]["type"], starts[1]["name"], starts[1]["input"]) == ("tool_use", "f", {})
    assert starts[1]["id"].startswith("toolu_")
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for _, delta in deltas) == "Ok."
    assert json.loads("".join(delta.get("partial_json", "") for _, delta in deltas)) == {"a": 1}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ids(CALLED)) + 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["lo", "zz"]}, "Hello", "stop_sequence", "lo"),
        ({"max_tokens": 3}, "Hello", "max_tokens", None),
        ({"tools": [TOOL]}, CALLED, "tool_use", None),
    ],
)
async def test_the_reason_for_the_end_is_reported(
    site: Site, fields: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    site.engine.script = says(text, finish="length" if reason == "max_tokens" else "stop")
    whole = (await call(site.app, PATH, {**HELLO, **fields})).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    *_, delta, _stop = await streamed(site, {**HELLO, **fields})
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.process
async def test_a_conversation_reaches_the_template_as_a_chats_does(site: Site) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "xyz"}, {"type": "redacted_thinking", "data": "abc"},
            {"type": "text", "text": "Ok."}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}], "is_error": True},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    chat = [
        {"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "Error: 7", "tool_call_id": "t1"}, {"role": "user", "content": "So?"},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    await call(site.app, PATH, {**HELLO, "messages": messages, "system": system, "tools": [TOOL]})
    function = {"name": "f", "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": function}]
    await call(site.app, "/v1/chat/completions", {"model": "tiny", "messages": chat, "tools": tools})
    mine, theirs = site.engine.submits
    assert mine.prompt_token_ids == theirs.prompt_token_ids


async def test_a_system_message_amid_messages_reaches_the_template_as_a_chats_does(site: Site) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Agents:"}, {"type": "text", "text": "none."}]},
    ]
    assert (await call(site.app, PATH, {**HELLO, "messages": messages})).status == 200
    counted = (await call(site.app, f"{PATH}/count_tokens", {**HELLO, "messages": messages})).json
    chat = [*messages[:1], {"role": "system", "content": "Agents:\nnone."}]
    await call(site.app, "/v1/chat/completions", {"model": "tiny", "messages": chat})
    mine, theirs = site.engine.submits
    assert mine.prompt_token_ids == theirs.prompt_token_ids
    assert counted == {"input_tokens": len(theirs.prompt_token_ids)}


@pytest.mark.process
async def test_anthropics_own_tools_are_left_out_and_named(site: Site) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    done = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "Ok."},
    ]
    history = [*HELLO["messages"], {"role": "assistant", "content": done}, *HELLO["messages"]]
    answer = await call(site.app, PATH, {**HELLO, "messages": history, "tools": [TOOL, search]})
    assert answer.status == 200, answer.body
    assert answer.headers["x-ignored-fields"].split(", ") == [
        "tools[1] web_search_20250305",
        "messages[1].content[0] server_tool_use",
        "messages[1].content[1] web_search_tool_result",
    ]
    said = [*HELLO["messages"], {"role": "assistant", "content": "Ok."}, *HELLO["messages"]]
    await call(site.app, PATH, {**HELLO, "messages": said, "tools": [TOOL]})
    assert len({submit.prompt_token_ids for submit in site.engine.submits}) == 1


async def test_strict_fields_refuse_a_tool_of_anthropics_own(make_site: SiteMaker) -> None:
    async with make_site(limits={"strict_fields": True}) as site:
        answer = await call(site.app, PATH, {**HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]})
        assert (answer.status, "tools[0].type: is Anthropic's own" in answer.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("form", ["blocks", "text"])
async def test_a_billing_line_before_the_instructions_changes_neither_prompt_nor_pieces(site: Site, form: str) -> None:
    def system(cch: str | None) -> Any:
        lines = [*([f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"] if cch else ()), "Be brief."]
        return [{"type": "text", "text": line} for line in lines] if form == "blocks" else "\n".join(lines)

    pieces = set()
    for cch in (None, "11111", "22222"):
        body = {**HELLO, "system": system(cch)}
        assert (await call(site.app, PATH, body)).status == 200
        pieces.add(tuple(prompt_pieces(body)))
    assert len({submit.prompt_token_ids for submit in site.engine.submits}) == 1
    assert len(pieces) == 1


async def test_an_assistants_last_message_is_gone_on_with(site: Site) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "It is"}]
    assert (await call(site.app, PATH, {**HELLO, "messages": messages})).status == 200
    assert site.engine.submits[0].prompt_token_ids == ids(CHAT_PROMPT + "It is")


async def test_thinking_is_a_block_of_its_own_and_can_be_forbidden(make_site: SiteMaker, model_directory: Path) -> None:
    template = CHATML + "{% if enable_thinking is false %}off{% endif %}{# <think> #}"
    (model_directory / "chat_template.jinja").write_text(template)
    async with make_site() as site:
        site.engine.script = says("<think>\nHm.\n</think>\n\nIt is.")
        asked = {**HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        answer = await call(site.app, PATH, asked)
        assert answer.json["content"] == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "It is."},
        ]
        assert answer.json["usage"]["output_tokens_details"]["thinking_tokens"] > 3
        assert answer.headers["x-ignored-fields"] == "thinking.budget_tokens"
        deltas = [event.get("delta", {}) for event in await streamed(site, asked)]
        assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
        await call(site.app, PATH, {**HELLO, "thinking": {"type": "disabled"}})
        assert site.engine.submits[-1].prompt_token_ids == ids(CHAT_PROMPT + "off")


@pytest.mark.process
async def test_the_form_of_an_answer_and_the_choice_of_a_tool_are_enforced(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        await call(site.app, PATH, {**HELLO, **fields})
    for choice in ({"type": "any"}, {"type": "tool", "name": "f", "disable_parallel_tool_use": True}):
        await call(site.app, PATH, {**HELLO, "tools": [TOOL], "tool_choice": choice})
    first, second, third, fourth = [submit.constraint for submit in site.engine.submits]
    assert first == second == Constraint("json_schema", json.dumps(schema, separators=(",", ":")))
    assert third is not None
    assert fourth is not None


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"model": "nope"}, 404, "not_found_error", "nope"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is required"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature: must be at most 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error", "content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "invalid_request_error", "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "invalid_request_error", "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error", "messages[0].content: must be a string or a list"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "invalid_request_error", "prompt is too long"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "tool", "name": "s"}}, 400, "invalid_request_error",
         "no tools to choose from"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, 400, "invalid_request_error", "no tool named 'g'"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"thinking": {"type": "much"}}, 400, "invalid_request_error", "thinking.type"),
        ({"output_format": {"type": "json"}}, 400, "invalid_request_error", "output_format"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         400, "invalid_request_error", "must end with text"),
    ],
)  # fmt: skip
async def test_errors_are_reported_in_the_dialects_own_shape(
    site: Site, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = await call(site.app, PATH, {**HELLO, **fields})
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)
    assert words in answer.json["error"]["message"]
    assert (await call(site.app, PATH, HELLO)).status == 200


@pytest.mark.process
async def test_tokens_are_counted_as_the_answers_usage_counts_them(site: Site) -> None:
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    counted = await call(site.app, f"{PATH}/count_tokens", {**body, "tools": [TOOL], "system": "Be brief."})
    answer = await call(site.app, PATH, {**HELLO, "tools": [TOOL], "system": "Be brief."})
    assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}
    refused = await call(site.app, f"{PATH}/count_tokens", {**body, "model": "nope"})
    assert (refused.status, refused.json["error"]["type"]) == (404, "not_found_error")


async def test_models_have_anthropics_shape_for_clients_that_name_its_version(site: Site) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = (await call(site.app, "/v1/models", **version)).json
    assert (listed["data"][0]["type"], listed["first_id"], listed["has_more"]) == ("model", "tiny", False)
    assert listed["data"][0]["created_at"].endswith("Z")
    assert (await call(site.app, "/v1/models/tiny", **version)).json == listed["data"][0]
    assert (await call(site.app, "/v1/models")).json["object"] == "list"


async def test_a_key_may_come_as_x_api_key(make_site: SiteMaker) -> None:
    keys = [{"name": "alice", "key_sha256": sha256(b"alices-key").hexdigest()}]
    async with make_site(door={"require_key": True}, keys=keys) as site:
        none = await call(site.app, PATH, HELLO)
        assert (none.status, none.json["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "alices-key"}, {"authorization": "Bearer alices-key"}):
            assert (await call(site.app, PATH, HELLO, **headers)).status == 200
        assert (await call(site.app, PATH, HELLO, **{"x-api-key": "another"})).status == 401
        first, second = site.engine.submits
        assert first.salt == second.salt


async def test_an_error_in_mid_stream_is_the_dialects_event(site: Site) -> None:
    site.engine.script = [*says("Hel")[:2], RuntimeError("boom")]
    events = await streamed(site, HELLO)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


async def test_counting_is_admitted_as_any_work_is(make_site: SiteMaker) -> None:
    async with make_site(limits={"max_inflight": 1}) as site:
        with site.admission.permit():
            refused = await call(site.app, f"{PATH}/count_tokens", HELLO)
    assert (refused.status, refused.json["error"]["type"]) == (529, "overloaded_error")
