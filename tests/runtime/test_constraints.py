"""What an answer must be reaches the engine in one form, whichever of the world's parameters said it."""

import json
from typing import Any

import pytest

from engine.protocol import Constraint
from runtime.answer_form import closed
from tests.asgi import call
from tests.fakes import says
from tests.runtime.conftest import Site

CHAT, COMPLETIONS, RUN = "/ai/v1/chat/completions", "/v1/completions", "/client/v4/accounts/a/ai/run/tiny"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "strict": True}},
]


def as_json(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema, separators=(",", ":")))


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, as_json({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, as_json(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, as_json(SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, as_json(SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, as_json(SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": None}}, as_json({"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA}}, as_json(SCHEMA)),
        ({"structured_outputs": {"regex": "a|b"}}, Constraint("regex", "a|b")),
        ({"structured_outputs": {"choice": ["a", "é"]}}, Constraint("choice", '["a","é"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("lark", 'start: "a"')),
        ({"guided_json": json.dumps(SCHEMA)}, as_json(SCHEMA)),
        ({"guided_regex": "a"}, Constraint("regex", "a")),
        ({"guided_choice": ["a"]}, Constraint("choice", '["a"]')),
        ({"guided_grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
    ],
)
async def test_every_way_to_say_it_is_one_constraint(
    site: Site, fields: dict[str, Any], constraint: Constraint | None
) -> None:
    assert (await call(site.app, CHAT, {**HELLO, **fields})).status == 200
    assert (await call(site.app, COMPLETIONS, {"model": "tiny", "prompt": "Hi", "n": 2, **fields})).status == 200
    assert (await call(site.app, RUN, {"prompt": "Hi", **fields})).status == 200
    assert [submit.constraint for submit in site.engine.submits] == [constraint] * 4


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tool_choice": "required"}, ["answer: section (", '\\"f\\"', '\\"g\\"', '"a": {"type": "integer"}']),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["answer: section\n"]),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ["body: call0\n", '\\"g\\"']),
        ({}, ["answer: text (section text)*", "text: /(.|\\n)*/"]),  # g is strict
        ({"response_format": {"type": "json_object"}}, ["| document\n", 'document: %json {"type": "object", ']),
    ],
)
async def test_calls_that_must_or_may_be_made_are_a_grammar(
    site: Site, fields: dict[str, Any], parts: list[str]
) -> None:
    assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS, **fields})).status == 200
    (submit,) = site.engine.submits
    assert submit.constraint is not None
    assert submit.constraint.kind == "lark"
    for part in parts:
        assert part in f"{submit.constraint.text}\n"


@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_of_tools_that_the_prompt_lists_only_the_allowed_ones_can_be_called(site: Site, is_wrapped: bool) -> None:
    """As each of OpenAI's two dialects writes it."""
    functions = [{"name": name, "parameters": SCHEMA} for name in "fgh"]

    def wrapped(function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": function} if is_wrapped else {"type": "function", **function}

    def choice(mode: str, names: str) -> dict[str, Any]:
        allowed = {"mode": mode, "tools": [wrapped({"name": name}) for name in names]}
        return {"type": "allowed_tools", **({"allowed_tools": allowed} if is_wrapped else allowed)}

    tools = [wrapped(function) for function in functions]
    path, asked = (CHAT, HELLO) if is_wrapped else ("/v1/responses", {"model": "tiny", "input": "Hi", "store": False})
    for said in ("auto", choice("auto", "fg"), choice("required", "fg"), choice("auto", "hfg")):
        answer = await call(site.app, path, {**asked, "tools": tools, "tool_choice": said})
        assert answer.status == 200, answer.body
    free, auto, required, all_of_them = site.engine.submits
    assert {submit.prompt_token_ids for submit in site.engine.submits} == {free.prompt_token_ids}
    assert all_of_them.constraint == free.constraint
    for submit, is_text in ((auto, True), (required, False)):
        assert submit.constraint is not None
        assert not submit.constraint.is_optional
        assert ("answer: text (section text)*" in submit.constraint.text) is is_text
        assert [f'\\"{name}\\"' in submit.constraint.text for name in "fgh"] == [True, True, False]


async def test_calls_that_nobody_demands_follow_their_schemas_where_they_can(site: Site) -> None:
    assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS[:1]})).status == 200
    (submit,) = site.engine.submits
    assert submit.constraint is not None
    assert submit.constraint.is_optional
    for part in ("answer: text (section text)*", '"additionalProperties": false', '"lenient": true'):
        assert part in submit.constraint.text


async def test_calls_that_must_be_made_follow_schemas_to_the_letter_where_a_tool_is_strict(site: Site) -> None:
    for tools in (TOOLS[:1], TOOLS):
        assert (await call(site.app, CHAT, {**HELLO, "tools": tools, "tool_choice": "required"})).status == 200
    free, strict = (submit.constraint.text for submit in site.engine.submits if submit.constraint is not None)
    assert '"lenient": true' in free
    assert '"lenient"' not in strict


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": "<tool_call>"}}}]},
        {"tools": []},
    ],
)
async def test_what_nobody_demands_and_nothing_could_enforce_is_no_grammar(site: Site, tools: dict[str, Any]) -> None:
    assert (await call(site.app, CHAT, {**HELLO, **tools})).status == 200
    assert [submit.constraint for submit in site.engine.submits] == [None]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"properties": {"a": True}, "required": ["b"]}, {"properties": {"a": True}, "required": ["b"]}),
        ({"properties": {"a": {}}, "required": [{}]}, {"properties": {"a": {}}, "required": [{}]}),
        ({"properties": {"a": {}}, "anyOf": []}, {"properties": {"a": {}}, "anyOf": []}),
        (
            {"properties": {"a": {"properties": {"b": {}}}, "c": {"type": "string"}}, "required": ["a"]},
            {
                "properties": {"a": {"properties": {"b": {}}, "additionalProperties": False}, "c": {"type": "string"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_a_closed_schema_names_every_key_that_there_may_be(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


async def test_a_forced_call_ends_for_tool_calls(site: Site) -> None:
    site.engine.script = says('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    answer = await call(site.app, CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "required"})
    (choice,) = answer.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


async def test_beside_tools_an_answer_may_have_any_constraint(site: Site) -> None:
    for fields in ({"guided_regex": "a/b\n"}, {"guided_choice": ["a", "b"]}, {"guided_grammar": 'start: "a"'}):
        assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS, **fields})).status == 200
    documents = [
        submit.constraint.text.partition("document: ")[2] for submit in site.engine.submits if submit.constraint
    ]
    assert documents == [r"/a\/b\n/", '"a" | "b"', '%lark {\nstart: "a"\n}']
