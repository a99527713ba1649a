"""The constraint of an answer reaches the engine in the same form, whichever API's parameters set it."""

import json
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Constraint
from pilotlight.runtime.generation.tool_schemas import closed
from tests.asgi import call
from tests.fakes import says
from tests.runtime.conftest import Site

pytestmark = pytest.mark.process

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
        ({}, ["answer: text (section text)*", "text: /(.|\\n)*/"]),  # the tool g is strict
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
    """Each of OpenAI's two dialects has a separate parameter for the allowed tools."""
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


async def test_calls_that_are_not_required_follow_their_schemas_where_they_can(site: Site) -> None:
    assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS[:1]})).status == 200
    (submit,) = site.engine.submits
    assert submit.constraint is not None
    assert submit.constraint.is_optional
    for part in ("answer: text (section text)*", '"additionalProperties": false', '"lenient": true'):
        assert part in submit.constraint.text


async def test_calls_follow_schemas_to_the_letter_where_their_tool_is_strict(site: Site) -> None:
    assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "required"})).status == 200
    free, strict = rules_of(site, "arguments")
    assert '"lenient": true' in free
    assert '"lenient"' not in strict


def rules_of(site: Site, name: str) -> list[str]:
    """Return the last grammar's rules whose names start with a prefix."""
    constraint = site.engine.submits[-1].constraint
    assert constraint is not None
    return [line for line in constraint.text.splitlines() if line.startswith(name)]


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def schema_of(properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **fields}


EMAIL = {"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+@[a-z]+$"}  # the pattern of z.email() in zod 4
PATTERN = {"type": "string", "pattern": "^[a-z]+$"}
BAD = schema_of({"email": EMAIL, "default": EMAIL, "code": PATTERN})


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_a_pattern_that_cannot_be_enforced_is_left_out_alone_and_named(site: Site, choice: Any) -> None:
    tools = [tool("f", SCHEMA), tool("invite", BAD)]
    answer = await call(site.app, CHAT, {**HELLO, "tools": tools, "tool_choice": choice})
    assert answer.status == 200, answer.body
    first, *others = rules_of(site, "arguments")
    assert '"a": {"type": "integer"}' in first
    if isinstance(choice, str):
        (second,) = others
        assert '"email": {"type": "string"}, "default": {"type": "string"}' in second
        assert "^[a-z]+$" in second
        assert '"additionalProperties": false' in second
        assert answer.headers["x-ignored-fields"] == "tools[1].pattern"
    else:
        assert not others


async def test_what_a_stream_leaves_out_is_named_too(site: Site) -> None:
    answer = await call(site.app, CHAT, {**HELLO, "tools": [tool("invite", BAD)], "stream": True})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "tools[0].pattern")


async def test_a_tool_whose_schema_cannot_be_enforced_at_all_is_free_alone(site: Site) -> None:
    tools = [tool("f", SCHEMA), tool("g", {"type": "colour"}), tool("h", {"const": "<tool_call>"})]
    answer = await call(site.app, CHAT, {**HELLO, "tools": tools})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "tools[1].parameters, tools[2].parameters")
    first, second, third = rules_of(site, "arguments")
    assert '"additionalProperties": false' in first
    for free in (second, third):
        assert '{"type": "object", "x-guidance"' in free


async def test_tools_that_are_too_large_together_are_free_and_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    async def refusal(vocabulary: Any, constraint: Constraint, owner: str) -> str | None:
        checked.append(constraint.text)
        return "it needs more than 3 s of CPU time" if constraint.text.count('"integer"') > 1 else None

    monkeypatch.setattr(site.app.site.generator.grammars, "refusal", refusal)
    answer = await call(site.app, CHAT, {**HELLO, "tools": [tool("f", SCHEMA), tool("g", SCHEMA)]})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "tools[0].parameters, tools[1].parameters")
    answer = await call(site.app, CHAT, {**HELLO, "tools": [tool(name, SCHEMA, strict=True) for name in "fg"]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "tools")
    assert "CPU time" in answer.json["error"]["message"]


async def test_a_number_that_cannot_be_enforced_is_left_out_alone(site: Site) -> None:
    schema = schema_of({"id": {"type": "integer", "maximum": 2**64 - 1}, "code": PATTERN})
    answer = await call(site.app, CHAT, {**HELLO, "tools": [tool("f", schema)]})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "tools[0].number")
    (rule,) = rules_of(site, "arguments")
    assert '"id": {"type": "integer"}' in rule
    assert "^[a-z]+$" in rule


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        (BAD, ["'invite'", "pattern", "look-around"]),
        (schema_of({"id": {"const": 2**53 + 1}}), ["'invite'", "number", "const", str(2**53 + 1)]),
        (schema_of({"id": {"not": {}}}), ["'invite'", '"not"']),
    ],
)
async def test_a_strict_tool_that_cannot_be_enforced_is_refused_with_its_name_and_the_keyword(
    site: Site, schema: dict[str, Any], parts: list[str]
) -> None:
    tools = [tool("f", SCHEMA), tool("invite", schema, strict=True)]
    answer = await call(site.app, CHAT, {**HELLO, "tools": tools})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", "tools[1]")
    for part in parts:
        assert part in error["message"]


async def test_beside_a_strict_tool_the_others_are_held_to_their_schemas(site: Site) -> None:
    tools = [tool("f", SCHEMA), tool("g", SCHEMA, strict=True)]
    assert (await call(site.app, CHAT, {**HELLO, "tools": tools})).status == 200
    assert all('"a": {"type": "integer"}' in rule for rule in rules_of(site, "arguments"))


async def test_a_tool_without_parameters_has_none_and_a_forced_call_no_keys_that_its_tool_lacks(site: Site) -> None:
    tools = [
        {"type": "function", "function": {"name": "f"}},
        tool("g", SCHEMA),
        tool("h", {}),
        tool("i", SCHEMA, strict=True),
    ]
    for choice in ("auto", "required"):
        assert (await call(site.app, CHAT, {**HELLO, "tools": tools, "tool_choice": choice})).status == 200
        empty, closed_too, free, strict = rules_of(site, "arguments")
        assert '"properties": {}, "additionalProperties": false' in empty
        assert '"additionalProperties": false' in closed_too
        assert '"additionalProperties": false' in strict
        assert "additionalProperties" not in free


@pytest.mark.parametrize(
    ("schema", "parts"),
    [
        ({"enum": [-9223372036854775807]}, ["enum", "-9223372036854775807"]),
        ({"const": 1234567890123456789}, ["const", "1234567890123456789"]),
        ({"type": "integer", "const": -1e300}, ["SIGSEGV"]),
        ({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/d0"}, ["SIGSEGV"]),
    ],
)
async def test_a_schema_that_would_end_an_engine_host_is_refused_by_name_and_reaches_none(
    site: Site, schema: dict[str, Any], parts: list[str]
) -> None:
    for path, asked in ((CHAT, HELLO), (COMPLETIONS, {"model": "tiny", "prompt": "Hi"})):
        answer = await call(site.app, path, {**asked, "guided_json": schema})
        while answer.status == 503:  # the machine may be too busy to answer within ten seconds
            answer = await call(site.app, path, {**asked, "guided_json": schema})
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert all(part in answer.json["error"]["message"] for part in parts), answer.body
    assert not site.engine.submits
    assert (await call(site.app, CHAT, {**HELLO, "guided_json": SCHEMA})).status == 200


def in_every_dialect(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return requests in every dialect whose answer follows the schema, or calls a strict tool that has it as its one argument."""
    form = {"type": "json_schema", "schema": schema}
    strict = schema_of({"p": schema})
    response = {"model": "tiny", "input": "Hi", "store": False}
    message = {**HELLO, "max_tokens": 9}
    return [
        (CHAT, {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
        (CHAT, {**HELLO, "tools": [tool("f", strict, strict=True)]}),
        (COMPLETIONS, {"model": "tiny", "prompt": "Hi", "guided_json": schema}),
        (RUN, {"prompt": "Hi", "response_format": {"type": "json_schema", "json_schema": schema}}),
        ("/v1/responses", {**response, "text": {"format": {**form, "name": "n"}}}),
        (
            "/v1/responses",
            {**response, "tools": [{"type": "function", "name": "f", "parameters": strict, "strict": True}]},
        ),
        ("/v1/messages", {**message, "output_format": form}),
        ("/v1/messages", {**message, "tools": [{"name": "f", "input_schema": strict, "strict": True}]}),
    ]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "schema", [{"enum": [1234567890123456789]}, {"const": -(2**63)}, {"minimum": 2**53 + 1, "type": "integer"}]
)
async def test_a_number_that_the_engine_cannot_hold_is_refused_in_every_dialect(
    site: Site, schema: dict[str, Any], is_stream: bool
) -> None:
    (number,) = [
        each
        for value in schema.values()
        for each in (value if isinstance(value, list) else [value])
        if isinstance(each, int)
    ]
    for path, asked in in_every_dialect(schema):
        answer = await call(site.app, path, {**asked, "stream": is_stream})
        assert answer.status == 400, (path, asked)
        assert str(number) in answer.body.decode(), (path, asked)
    assert not site.engine.submits
    for path, asked in in_every_dialect({"enum": [123456789012345]}):
        assert (await call(site.app, path, asked)).status == 200, (path, asked)


async def test_of_a_document_and_tools_the_one_that_cannot_be_enforced_is_named(site: Site) -> None:
    asked = {**HELLO, "tools": [tool("invite", BAD)], "guided_json": {"type": "colour"}}
    answer = await call(site.app, CHAT, asked)
    assert answer.status == 400
    assert "the JSON schema cannot be enforced" in answer.json["error"]["message"]


@pytest.mark.parametrize("tools", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_that_may_be_called_there_is_no_grammar(site: Site, tools: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("fields", "is_call"),
    [
        ({}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]}, False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                }
            },
            False,
        ),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
async def test_a_call_without_tags_counts_only_where_no_constraint_is_promised(
    site: Site, fields: dict[str, Any], is_call: bool
) -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    site.engine.script = says(text)
    answer = await call(site.app, CHAT, {**HELLO, "tools": TOOLS, **fields})
    message = answer.json["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == ((None, True) if is_call else (text, False))


async def test_beside_tools_an_answer_may_have_any_constraint(site: Site) -> None:
    for fields in ({"guided_regex": "a/b\n"}, {"guided_choice": ["a", "b"]}, {"guided_grammar": 'start: "a"'}):
        assert (await call(site.app, CHAT, {**HELLO, "tools": TOOLS, **fields})).status == 200
    documents = [
        submit.constraint.text.partition("document: ")[2] for submit in site.engine.submits if submit.constraint
    ]
    assert documents == [r"/a\/b\n/", "/(?:a|b)/", '%lark {\nstart: "a"\n}']
