"""Tools of Responses other than plain functions, and their calls in answers and histories."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.asgi import call
from tests.fakes import TOKENIZER, FakeEngineClient, FakeLauncher, ids, says
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_responses import CHAT_PROMPT, HELLO, PATH, streamed

pytestmark = pytest.mark.process

SPAWN = {
    "type": "function",
    "name": "spawn",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches."}
# The declarations of Codex 0.171.
CODEX_TOOLS = [SPAWN, AGENTS, {"type": "web_search", "external_web_access": False}, PATCH]


def called(name: str, arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


@pytest.fixture
async def site(make_site: SiteMaker) -> AsyncIterator[Site]:
    def prepare(client: FakeEngineClient) -> None:
        client.context_length = 4096

    async with make_site(launcher=FakeLauncher(prepare)) as made:
        yield made


async def answered(
    site: Site, text: str, *, finish: str = "stop", **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a whole answer, and the events of the same answer as a stream. Check that they agree."""
    site.engine.script = says(text, finish=finish)
    whole = await call(site.app, PATH, {**HELLO, "tools": CODEX_TOOLS, **fields})
    assert whole.status == 200, whole.body
    site.engine.script = says(text, finish=finish)
    events = await streamed(site, {**HELLO, "tools": CODEX_TOOLS, **fields})
    (mine,), (theirs,) = whole.json["output"], events[-1]["response"]["output"]
    varying = ("id", "call_id")
    assert {name: mine[name] for name in mine if name not in varying} == {
        name: theirs[name] for name in theirs if name not in varying
    }
    return mine, events


async def test_a_namespaces_function_is_called_by_both_names_and_comes_back_with_its_namespace(site: Site) -> None:
    item, events = await answered(site, called("agents__spawn", {"a": 1}))
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn", "agents")
    assert item["arguments"] == '{"a": 1}'
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("spawn", '{"a": 1}')
    prompt = TOKENIZER.decode(site.engine.submits[0].prompt_token_ids)
    assert '"name": "agents__spawn"' in prompt
    assert "web_search" not in prompt
    plain, _ = await answered(site, called("spawn", {"a": 2}))
    assert (plain["name"], "namespace" in plain) == ("spawn", False)


@pytest.mark.parametrize("text", ['*** Begin "patch"\n+\u00e9\U0001f408\\\n', ""])
async def test_a_custom_tools_call_has_its_input_as_text(site: Site, text: str) -> None:
    item, events = await answered(site, called("apply_patch", {"input": text}))
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
    assert item["id"].startswith("ctc_")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert (done["input"], done["item_id"]) == (text, events[-1]["response"]["output"][0]["id"])
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["type"], added["input"], added["id"]) == ("custom_tool_call", "", done["item_id"])


async def test_a_custom_tools_call_that_is_cut_has_the_beginning_of_its_input(site: Site) -> None:
    item, _ = await answered(site, called("apply_patch", {"input": "abc def"})[:-20], finish="length")
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert item["input"]
    assert "abc def".startswith(item["input"])


async def test_what_is_left_out_is_named(site: Site) -> None:
    lark = {**PATCH, "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
    answer = await call(site.app, PATH, {**HELLO, "tools": [*CODEX_TOOLS, lark], "input": HISTORY})
    assert answer.status == 200, answer.body
    named = answer.headers["x-ignored-fields"].split(", ")
    assert named == ["tools[2] web_search", "tools[4].format", "input[1] web_search_call", "input[2] compaction"]
    kinds = [tool["type"] for tool in answer.json["tools"]]
    assert kinds == ["function", "namespace", "web_search", "custom", "custom"]


async def test_strict_fields_refuse_a_tool_that_is_not_run_here(make_site: SiteMaker) -> None:
    async with make_site(limits={"strict_fields": True}) as site:
        answer = await call(site.app, PATH, {**HELLO, "tools": [SPAWN, {"type": "web_search"}]})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools[1]")


HISTORY = [
    {"role": "user", "content": "Hi"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
    {"type": "function_call", "call_id": "c1", "name": "spawn", "namespace": "agents", "arguments": '{"a": 1}'},
    {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "+a\n"},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "c3", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "function_call_output", "call_id": "c1", "output": "one"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    {"type": "local_shell_call_output", "id": "c3", "output": "three"},
    {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "four", "stderr": ""}]},
]  # fmt: skip


async def test_items_of_all_these_tools_are_read_in_a_history(site: Site) -> None:
    answer = await call(site.app, PATH, {**HELLO, "input": HISTORY})
    assert answer.status == 200, answer.body
    calls = [
        ("c1", "agents__spawn", {"a": 1}),
        ("c2", "apply_patch", {"input": "+a\n"}),
        ("c3", "local_shell", {"action": {"type": "exec", "command": ["ls"]}}),
    ]
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in calls]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"}, {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c3", "content": "three"},
        {"role": "tool", "tool_call_id": "c3", "content": '[{"stdout": "four", "stderr": ""}]'},
    ]  # fmt: skip
    await call(site.app, "/v1/chat/completions", {"model": "tiny", "messages": chat})
    mine, theirs = site.engine.submits
    assert mine.prompt_token_ids == theirs.prompt_token_ids


async def test_a_call_of_any_of_these_tools_may_be_forced(site: Site) -> None:
    choices = (
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "spawn", "namespace": "agents"},
        {"type": "function", "name": "agents__spawn"},
    )
    for choice in choices:
        answer = await call(site.app, PATH, {**HELLO, "tools": CODEX_TOOLS, "tool_choice": choice})
        assert answer.status == 200, answer.body
    forced = [submit.constraint for submit in site.engine.submits]
    assert all(forced)
    assert forced[0] != forced[1] == forced[2]


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
async def test_verbosity_is_a_hint_that_templates_may_read(
    make_site: SiteMaker, model_directory: Any, verbosity: str
) -> None:
    template = (model_directory / "tokenizer_config.json").read_text()
    (model_directory / "tokenizer_config.json").write_text(
        template.replace("assistant\\\\n' }}", "assistant\\\\n' }}{{ verbosity }}")
    )
    async with make_site() as site:
        answer = await call(site.app, PATH, {**HELLO, "text": {"verbosity": verbosity}})
        assert (answer.status, answer.json["text"]["verbosity"]) == (200, verbosity)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "verbosity": verbosity}
        assert (await call(site.app, "/v1/chat/completions", chat)).status == 200
        assert {submit.prompt_token_ids for submit in site.engine.submits} == {ids(CHAT_PROMPT + verbosity)}
