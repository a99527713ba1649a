"""Custom tools of chats: calls that are whole, streamed, cut, continued, and part of a history."""

import json
from typing import Any

import pytest

from tests.asgi import call
from tests.fakes import TOKENIZER, says
from tests.runtime.conftest import Site

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
SAID = {"role": "user", "content": "Hi"}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [SAID], "tools": [PATCH]}


def calling(arguments: Any) -> str:
    return f'<tool_call>{{"name": "patch", "arguments": {json.dumps(arguments)}}}</tool_call>'


async def answered(site: Site, text: str, finish: str = "stop") -> tuple[str, str]:
    """Return the input of an answer's call, as a whole answer and as a stream have it. Check the form of both."""
    site.engine.script = says(text, finish=finish)
    (whole,) = (await call(site.app, CHAT, ASKED)).json["choices"][0]["message"]["tool_calls"]
    site.engine.script = says(text, finish=finish)
    events = (await call(site.app, CHAT, {**ASKED, "stream": True})).events[:-1]
    parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls", ())]
    assert (whole["type"], whole["custom"]["name"], "function" in whole) == ("custom", "patch", False)
    assert (parts[0]["type"], parts[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert all(part.keys() == {"index", "custom"} for part in parts[1:])
    return whole["custom"]["input"], "".join(part["custom"]["input"] for part in parts)


@pytest.mark.parametrize("text", ['+ "a"\n\u00e9\U0001f408', ""])
async def test_a_call_has_its_input_as_text(site: Site, text: str) -> None:
    assert await answered(site, calling({"input": text})) == (text, text)


async def test_arguments_of_another_form_are_the_input_as_they_are(site: Site) -> None:
    assert await answered(site, calling({"patch": 1})) == ('{"patch": 1}', '{"patch": 1}')


async def test_a_call_that_was_cut_has_the_beginning_of_its_input(site: Site) -> None:
    whole, streamed = await answered(site, calling({"input": "abc def"})[:-20], "length")
    assert whole == streamed
    assert whole
    assert "abc def".startswith(whole)


async def test_a_history_has_such_calls(site: Site) -> None:
    made = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    history = [SAID, {"role": "assistant", "content": None, "tool_calls": [made]}, result]
    answer = await call(site.app, CHAT, {"model": "tiny", "messages": history})
    assert answer.status == 200, answer.body
    assert '"arguments": {"input": "+a"}' in TOKENIZER.decode(site.engine.submits[0].prompt_token_ids)


async def test_a_format_is_enforced_or_named_and_a_call_may_be_forced(site: Site) -> None:
    def formed(syntax: str) -> dict[str, Any]:
        form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": "start: /a/"}}
        return {"type": "custom", "custom": {"name": "patch", "format": form}}

    forced = {"type": "custom", "custom": {"name": "patch"}}
    for syntax, ignored in (("regex", None), ("lark", "tools[0].custom.format")):
        answer = await call(site.app, CHAT, {**ASKED, "tools": [formed(syntax)], "tool_choice": forced})
        assert (answer.status, answer.headers.get("x-ignored-fields")) == (200, ignored)
    assert all(submit.constraint for submit in site.engine.submits)
    for tool, param in (({"type": "custom"}, "tools[0].custom"), ({"type": "function"}, "tools[0].function")):
        assert (await call(site.app, CHAT, {**ASKED, "tools": [tool]})).json["error"]["param"] == param
    wrong = {"type": "custom", "custom": {"name": "f", "format": {"type": "xml"}}}
    refused = await call(site.app, CHAT, {**ASKED, "tools": [wrong]})
    assert refused.json["error"]["param"] == "tools[0].custom.format"
