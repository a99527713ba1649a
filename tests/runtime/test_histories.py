"""A site accepts its own answers, in each dialect and cut at any place, as the history of the next request."""

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from pilotlight.wire.sse import EventDecoder
from tests.asgi import call
from tests.fakes import TOKENIZER, FakeEngineClient, FakeLauncher, ids, says
from tests.runtime.conftest import Site, SiteMaker

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
RUN = "/client/v4/accounts/acc1/ai/run/@test/tiny"
PARAMETERS = {"type": "object", "properties": {"a": {}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
TEXT = 'Ok. <tool_call>{"name": "f", "arguments": {"a": "it is"}}</tool_call>'
DEEP = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 120 + "]" * 120 + "}}</tool_call>"
ANSWERS = [
    *((TEXT[:end], "length") for end in range(0, len(TEXT), 3)),
    (TEXT, "stop"),
    (DEEP, "stop"),
    (DEEP[:90], "length"),
]
SAID = {"role": "user", "content": "Hi"}


def nested(depth: int) -> Any:
    return json.loads('{"a":' * depth + "1" + "}" * depth)


def with_a_long_context(client: FakeEngineClient) -> None:
    client.context_length = 65536


# The suite tests a random sample; PILOTLIGHT_DRAWN=100000 makes it that large.
NUM_DRAWN = int(os.environ.get("PILOTLIGHT_DRAWN", "100"))

Dialect = Callable[[Site, bool], Any]


async def streamed(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await call(site.app, path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    return [json.loads(event.data) for event in EventDecoder().feed(answer.body) if event.data not in (None, b"[DONE]")]


async def chat(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    asked = {"model": "tiny", "messages": [SAID], "tools": [{"type": "function", "function": FUNCTION}]}
    if not is_streamed:
        message = (await call(site.app, CHAT, asked)).json["choices"][0]["message"]
    else:
        message = {"role": "assistant", "content": None, "tool_calls": []}
        for event in await streamed(site, CHAT, asked):
            delta = event["choices"][0]["delta"]
            message["content"] = (
                (message["content"] or "") + delta["content"] if delta.get("content") else message["content"]
            )
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    message["tool_calls"].append(part)
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": "not run"} for made in message.get("tool_calls") or ()
    ]
    return CHAT, {**asked, "messages": [SAID, message, *results, SAID]}


async def run(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    asked = {"messages": [SAID], "tools": [FUNCTION]}
    if not is_streamed:
        result = (await call(site.app, RUN, asked)).json["result"]
        message = {"role": "assistant", "content": result["response"], "tool_calls": result.get("tool_calls")}
    else:
        events = await streamed(site, RUN, asked)
        made = [one for event in events for one in event.get("tool_calls", ())]
        message = {"role": "assistant", "content": "".join(event["response"] for event in events), "tool_calls": made}
    return RUN, {**asked, "messages": [SAID, message, SAID]}


async def messages(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    tool = {"name": "f", "input_schema": PARAMETERS}
    asked = {"model": "tiny", "max_tokens": 300, "messages": [SAID], "tools": [tool]}
    if not is_streamed:
        content = (await call(site.app, MESSAGES, asked)).json["content"]
    else:
        content, partial = [], ""
        for event in await streamed(site, MESSAGES, asked):
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
                partial = ""
            elif event["type"] == "content_block_delta":
                partial += event["delta"].get("partial_json", "")
                content[-1]["text"] = content[-1].get("text", "") + event["delta"].get("text", "")
            elif event["type"] == "content_block_stop" and content[-1]["type"] == "tool_use":
                content[-1] = {**content[-1], "input": as_client_reads(partial)}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "not run"}
        for block in content
        if block["type"] == "tool_use"
    ]
    answered = {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}
    return MESSAGES, {**asked, "messages": [SAID, {"role": "assistant", "content": content}, answered]}


def as_client_reads(partial: str) -> Any:
    try:
        return json.loads(partial or "{}")
    except ValueError:
        return {}  # a client cannot read arguments that are cut off


async def ollama(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": FUNCTION}]
    asked = {"model": "tiny", "messages": [SAID], "tools": tools, "stream": is_streamed}
    answer = await call(site.app, OLLAMA, asked)
    assert answer.status == 200, answer.body
    lines = [json.loads(line)["message"] for line in answer.body.splitlines()]
    made = [one for line in lines for one in line.get("tool_calls", ())]
    message = {"role": "assistant", "content": "".join(line["content"] for line in lines), "tool_calls": made}
    results = [{"role": "tool", "tool_name": one["function"]["name"], "content": "not run"} for one in made]
    return OLLAMA, {**asked, "messages": [SAID, message, *results, SAID]}


async def responses(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    asked = {"model": "tiny", "input": [SAID], "tools": [{"type": "function", **FUNCTION}]}
    output = await output_of(site, asked, is_streamed)
    return RESPONSES, {**asked, "input": [SAID, *output["output"], *results_of(output), SAID]}


async def kept(site: Site, is_streamed: bool) -> tuple[str, dict[str, Any]]:
    asked = {"model": "tiny", "input": [SAID], "tools": [{"type": "function", **FUNCTION}]}
    output = await output_of(site, asked, is_streamed)
    return RESPONSES, {**asked, "previous_response_id": output["id"], "input": [*results_of(output), SAID]}


async def output_of(site: Site, asked: dict[str, Any], is_streamed: bool) -> Any:
    if is_streamed:
        return (await streamed(site, RESPONSES, asked))[-1]["response"]
    return (await call(site.app, RESPONSES, asked)).json


def results_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": "not run"} for item in calls]


@pytest.mark.process
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, run, messages, responses, kept, ollama])
async def test_an_answer_that_was_cut_anywhere_is_taken_back(site: Site, dialect: Dialect, is_streamed: bool) -> None:
    for text, finish in ANSWERS:
        site.engine.script = says(text, finish=finish, per_step=7)
        path, body = await dialect(site, is_streamed)
        site.engine.script = says("Fine.")
        answer = await call(site.app, path, body)
        assert answer.status == 200, (text, body, answer.body)


VALUES: tuple[Any, ...] = (
    "Paris",
    'a "b"',
    "line\nbreak",
    "</tool_call>",
    "日本語",
    "🐈",
    "\\",
    "{",
    "",
    7,
    -1.5,
    2**70,
    None,
    True,
    [1, ["x"]],
    {"k": {}},
)


def drawn_answer(drawing: random.Random) -> str:
    """Return text, reasoning and calls in random order; some are malformed."""
    pieces = []
    for _ in range(drawing.randint(0, 4)):
        arguments = {key: drawing.choice(VALUES) for key in drawing.sample("abc", drawing.randint(0, 3))}
        written = json.dumps(arguments, ensure_ascii=drawing.random() < 0.5)
        if drawing.random() < 0.2:
            written = drawing.choice(("[]", "no", written[:-1], '"x"', "{'a': 1}", "[" * 90 + "]" * 90))
        made = f'<tool_call>{{"name": "{drawing.choice(("f", "g"))}", "arguments": {written}}}</tool_call>'
        pieces.append(drawing.choice((made, made, "Ok. ", "日本", "<think>Hm.</think>", "<tool_call>", " \n")))
    return "".join(pieces)


async def check_drawn(site: Site, drawing: random.Random) -> None:
    """Draw a random answer, cut it at a random place, and send it as history in a random dialect."""
    text = drawn_answer(drawing)
    is_cut = drawing.random() < 0.5
    shown = text[: drawing.randint(0, len(text))] if is_cut else text
    site.engine.script = says(shown, finish="length" if is_cut else "stop", per_step=drawing.randint(1, 9))
    dialect = drawing.choice((chat, run, messages, responses, kept, ollama))
    path, body = await dialect(site, drawing.random() < 0.5)
    site.engine.script = says("Fine.")
    answer = await call(site.app, path, {**body, "stream": False})
    assert answer.status == 200, (shown, body, answer.body)


async def test_drawn_answers_are_taken_back_by_every_dialect(make_site: SiteMaker) -> None:
    drawing = random.Random(7)
    async with make_site(launcher=FakeLauncher(with_a_long_context)) as site:
        for _ in range(NUM_DRAWN):
            await check_drawn(site, drawing)


@pytest.mark.parametrize("message", [{"content": None}, {"content": None, "tool_calls": []}, {"tool_calls": []}])
async def test_an_assistants_message_may_be_empty(site: Site, message: dict[str, Any]) -> None:
    body = {"messages": [SAID, {"role": "assistant", **message}, SAID]}
    for path in (CHAT, RUN):
        assert (await call(site.app, path, {"model": "tiny", **body})).status == 200
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert {submit.prompt_token_ids for submit in site.engine.submits} == {ids(turn + "<|im_end|>\n" + turn)}


@pytest.mark.parametrize("given", ["no", "[]", '{"a":' * 5000 + "1" + "}" * 5000, nested(101), nested(900), [1], 7])
async def test_arguments_that_are_no_readable_object_reach_the_template_as_text(
    make_site: SiteMaker, given: Any
) -> None:
    made = {"function": {"name": "f", "arguments": given}}
    history = [{"role": "assistant", "tool_calls": [made]}, SAID]
    async with make_site(launcher=FakeLauncher(with_a_long_context)) as site:
        answer = await call(site.app, CHAT, {"model": "tiny", "messages": history})
        assert answer.status == 200, answer.body
        written = given if isinstance(given, str) else json.dumps(given)
        assert json.dumps(written) in TOKENIZER.decode(site.engine.submits[0].prompt_token_ids)
