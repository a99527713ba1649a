"""A model's reasoning: separate from its answer, counted, and not subject to the answer's stop strings and constraints."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Constraint
from tests.asgi import call
from tests.fakes import says
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

CHAT = "/ai/v1/chat/completions"
RUN = "/client/v4/accounts/a/ai/run/tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if begins %}<think>\n"
    "{% elif enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# <tool_call> #}"
)
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi <think>"}]}
BEGINS = {**ASKED, "chat_template_kwargs": {"begins": True}}
THOUGHT = "Hm. END?\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture
def make_thinker(make_site: SiteMaker, model_directory: Path) -> SiteMaker:
    (model_directory / "chat_template.jinja").write_text(TEMPLATE)
    return make_site


async def test_reasoning_is_a_field_of_its_own_in_every_shape(make_thinker: SiteMaker) -> None:
    async with make_thinker() as site:
        for body, text in ((BEGINS, THOUGHT), (ASKED, f"<think>{THOUGHT}")):
            site.engine.script = says(f"{text}It is. END")
            answer = await call(site.app, CHAT, {**body, "stop": "END"})
            message = answer.json["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm. END?"
            assert message["reasoning"] == "Hm. END?"
            assert message["content"] == "It is. "
            usage = answer.json["usage"]
            assert 15 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
            streamed = await call(site.app, CHAT, {**body, "stop": "END", "stream": True})
            deltas = [event["choices"][0]["delta"] for event in streamed.events[:-1]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm. END?"
            assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm. END?"
            assert "".join(delta.get("content") or "" for delta in deltas) == "It is. "


async def test_the_native_path_has_it_beside_the_response(make_thinker: SiteMaker) -> None:
    async with make_thinker() as site:
        site.engine.script = says(f"<think>{THOUGHT}It is.")
        result = (await call(site.app, RUN, {"prompt": "Hi"})).json["result"]
        assert (result["reasoning_content"], result["response"]) == ("Hm. END?", "It is.")


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_without_reasoning_the_answer_begins_at_once(make_thinker: SiteMaker, off: dict[str, Any]) -> None:
    async with make_thinker() as site:
        site.engine.script = says("It <think> is.")
        fields = {**ASKED, **off, "response_format": {"type": "json_object"}}
        answer = await call(site.app, CHAT, fields)
        message = answer.json["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == ("It <think> is.", False)
        assert answer.json["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        }
        assert site.engine.submits[0].constraint == Constraint("json_schema", '{"type":"object"}')


@pytest.mark.parametrize(
    ("fields", "start", "part"),
    [
        (
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"begins": True}},
            "start: thought ",
            "answer: %json {",
        ),
        ({"response_format": {"type": "json_object"}}, 'start: ("<think>" thought ', "answer: %json {"),
        ({"guided_regex": "a/b"}, 'start: ("<think>" thought ', r"answer: /a\/b/"),
        ({"tools": [TOOL], "tool_choice": "required"}, 'start: ("<think>" thought ', "answer: section"),
    ],
)
async def test_a_constraint_of_an_answer_starts_after_the_reasoning(
    make_thinker: SiteMaker, fields: dict[str, Any], start: str, part: str
) -> None:
    async with make_thinker() as site:
        assert (await call(site.app, CHAT, {**ASKED, **fields})).status == 200
        (submit,) = site.engine.submits
        assert submit.constraint is not None
        assert submit.constraint.kind == "lark"
        assert start in submit.constraint.text
        assert part in submit.constraint.text


async def test_an_open_last_message_may_be_in_the_middle_of_the_reasoning(make_thinker: SiteMaker) -> None:
    async with make_thinker() as site:
        for started, expected in (
            ("<think> I was", ("ing. END?", "It is.")),
            ("<think>x</think>", (None, "ing. END?\n</think>\n\nIt is.")),
        ):
            site.engine.script = says("ing. END?\n</think>\n\nIt is.")
            messages = [*ASKED["messages"], {"role": "assistant", "content": started}]
            body = {**ASKED, "messages": messages, "continue_final_message": True}
            message = (await call(site.app, CHAT, body)).json["choices"][0]["message"]
            assert (message.get("reasoning"), message["content"]) == expected


async def test_a_site_s_file_names_the_format_of_a_model_s_calls(make_site: SiteMaker, model_directory: Path) -> None:
    model = {"name": "tiny", "source": str(model_directory), "tool_format": "qwen3_coder"}
    async with make_site(models=[model]) as site:
        site.engine.script = says(
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        )
        answer = await call(site.app, CHAT, {**ASKED, "tools": [TOOL]})
        (made,) = answer.json["choices"][0]["message"]["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ({"name": "a<b"}, "cannot express the name 'a<b'"),
        (
            {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string", "format": "date"}}}},
            "'format' of the string 's'",
        ),
        (
            {"name": "f", "parameters": {"type": "object", "properties": {"<tool_call>": {}}}},
            "spells the token '<tool_call>'",
        ),
    ],
)
async def test_a_tool_that_the_format_cannot_call_is_refused_by_name(
    make_site: SiteMaker, model_directory: Path, function: dict[str, Any], part: str
) -> None:
    model = {"name": "tiny", "source": str(model_directory), "tool_format": "qwen3_coder"}
    async with make_site(models=[model]) as site:
        body = {**ASKED, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
        answer = await call(site.app, CHAT, body)
        assert answer.status == 400
        assert answer.json["error"]["param"].startswith("tools")
        assert part in answer.json["error"]["message"]
        assert (await call(site.app, CHAT, ASKED)).status == 200


async def test_what_a_schema_says_to_people_is_no_part_of_the_grammar(make_site: SiteMaker) -> None:
    described = {
        "type": "object",
        "description": "<tool_call>",
        "properties": {"description": {"type": "string", "title": "T"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": described, "strict": True}}
    async with make_site() as site:
        assert (await call(site.app, CHAT, {**ASKED, "tools": [tool]})).status == 200
        (submit,) = site.engine.submits
        assert submit.constraint is not None
        expected = {
            "type": "object",
            "properties": {"description": {"type": "string"}},
            "additionalProperties": False,
            "x-guidance": {"whitespace_pattern": " "},
        }
        assert f"%json {json.dumps(expected)}" in submit.constraint.text
