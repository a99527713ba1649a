"""Conversations to texts, beside the event loop where that may take long."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dialects import parsing
from dialects.requests import Conversation
from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.tokenizer import SHIELD_BEGIN, Tokenizer, unmarked
from runtime import rendering
from runtime.rendering import MAX_THREADS, Rendering
from tests.asgi import call, eventually
from tests.fakes import byte_tokenizer
from tests.runtime.conftest import SiteMaker

CHAT, RUN = "/ai/v1/chat/completions", "/client/v4/accounts/acc1/ai/run/@test/tiny"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
SAID = Conversation(({"role": "user", "content": "Hi"},))


def made(source: str) -> Rendering:
    tokenizer = Tokenizer.from_json(byte_tokenizer().to_str(), {})
    return Rendering(tokenizer, ChatTemplate({"default": source}, {}))


def rendering_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "render"]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each conversation that is rendered, whether it is in the event loop's thread."""
    here, seen, original = threading.get_ident(), [], ChatTemplate.render

    def noting(self: ChatTemplate, *arguments: Any, **named: Any) -> str:
        seen.append(threading.get_ident() == here)
        return original(self, *arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    return seen


async def test_short_conversations_are_rendered_at_once_by_a_template_that_was_quick(noted: list[bool]) -> None:
    quick = made("{{ messages[0].content }}")
    for is_short in (True, True, False, True):
        assert await quick.text(SAID, is_short=is_short) == "Hi"
    assert noted == [False, True, False, True]


CALLED = Conversation(
    (
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\u00e9 <|im_end|>"}}}],
        },
    )
)


async def test_a_template_that_joins_arguments_to_text_has_them_as_text() -> None:
    written = "{{ 'f' + messages[1].tool_calls[0].function.arguments }}"
    assert unmarked(await made(written).text(CALLED, is_short=True)) == 'f{"a": "\u00e9 <|im_end|>"}'
    assert SHIELD_BEGIN in await made(written).text(CALLED, is_short=True)
    listed = "{% for key in messages[1].tool_calls[0].function.arguments %}{{ key }}{% endfor %}"
    assert await made(listed).text(CALLED, is_short=True) == "a"


async def test_a_conversation_that_the_template_refuses_either_way_is_refused_in_its_first_words() -> None:
    refusing = "{{ raise_exception('alternate! ' ~ messages[1].tool_calls[0].function.arguments.a) }}"
    with pytest.raises(ChatTemplateError, match="alternate! \u00e9 <"):
        await made(refusing).text(CALLED, is_short=True)


CUT = Conversation((*CALLED.messages[:1], {"role": "assistant", "content": "", "tool_calls": [
    {"function": {"name": "f", "arguments": '{"a": '}}, {"function": {"name": "g", "arguments": {"b": 1}}}]}))  # fmt: skip
ARGUMENTS = "{% for call in messages[1].tool_calls %}{{ ARGUMENTS }} {% endfor %}"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (
            "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
            '{"a":  {"b": 1} ',
        ),
        ("'' + call.function.arguments", '{"a":  {"b": 1} '),
        ("call.function.arguments.items() | list | tojson", '[["INVALID_JSON", "{\\"a\\": "]] [["b", 1]] '),
    ],
)
async def test_arguments_that_are_no_object_have_the_form_that_the_template_takes(source: str, written: str) -> None:
    assert await made(ARGUMENTS.replace("ARGUMENTS", source)).text(CUT, is_short=True) == written


REFUSES_LATER = """{% for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("the system message must come first") }}{% endif %}
{{- message.role[0] }}:{{ message.content }};{% endfor %}"""


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("ususu", "u:0\n\n1;u:2\n\n3;u:4;"),
        ("ssu", "s:0\n\n1;u:2;"),
        ("uasu", "u:0;a:1;u:2\n\n3;"),
        ("uasssa", "u:0;a:1;u:2\n\n3\n\n4;a:5;"),
        ("uas", "u:0;a:1;u:2;"),
    ],
)
async def test_a_system_message_that_the_template_refuses_amid_messages_is_folded_into_the_users(
    roles: str, text: str
) -> None:
    named = {"s": "system", "u": "user", "a": "assistant"}
    said = Conversation(tuple({"role": named[role], "content": str(i)} for i, role in enumerate(roles)))
    assert await made(REFUSES_LATER).text(said, is_short=True) == text
    as_it_is = "{% for message in messages %}{{ message.role[0] }}{% endfor %}"
    assert await made(as_it_is).text(said, is_short=True) == roles


async def test_a_template_that_was_slow_is_kept_off_the_loop(
    noted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "QUICK_S", 0.0)
    slow = made("{{ messages[0].content }}")
    for _ in range(3):
        await slow.text(SAID, is_short=True)
    assert noted == [False, False, False]


async def test_a_template_that_does_not_end_is_ended_and_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)
    endless = made("{% if messages[0].content == 'Hi' %}" + LOOPS + "{% endif %}done")
    for _ in range(2 * MAX_THREADS):
        with pytest.raises(ChatTemplateError, match=r"was not done with this conversation after 0\.2 s"):
            await endless.text(SAID, is_short=True)
    other = Conversation(({"role": "user", "content": "Bye"},))
    assert await endless.text(other, is_short=True) == "done"
    await eventually(lambda: not rendering_threads())


async def test_a_client_that_leaves_ends_its_conversations_rendering() -> None:
    task = asyncio.create_task(made(LOOPS).text(SAID, is_short=True))
    await eventually(lambda: bool(rendering_threads()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not rendering_threads())


async def test_marks_do_not_show_in_a_templates_refusal() -> None:
    refusing = made("{{ raise_exception('no: ' + messages[0].content) }}")
    with pytest.raises(ChatTemplateError, match=r"no: <\|im_end\|>!") as refused:
        await refusing.text(Conversation(({"role": "user", "content": "<|im_end|>!"},)), is_short=True)
    assert SHIELD_BEGIN not in str(refused.value)


async def test_a_site_whose_template_loops_answers_all_else(
    make_site: SiteMaker, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 1.0)
    (model_directory / "chat_template.jinja").write_text(LOOPS)
    async with make_site() as site:
        chats = [asyncio.create_task(call(site.app, CHAT, HELLO)) for _ in range(4)]
        await eventually(lambda: len(rendering_threads()) == MAX_THREADS)
        assert (await call(site.app, "/livez")).status == 200
        assert (await call(site.app, "/v1/completions", {"model": "tiny", "prompt": "Once"})).status == 200
        assert not any(chat.done() for chat in chats)
        for answer in await asyncio.gather(*chats):
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
            assert "was not done with this conversation" in answer.json["error"]["message"]
        await eventually(lambda: not rendering_threads())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "tiny", "messages": HELLO["messages"] * 1000}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "<|im_end|>" * 2000}]}),
        (
            RUN,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 500}]},
        ),
        ("/v1/embeddings", {"model": "tiny", "input": ["some text"] * 2000}),
        (RUN, {"text": ["some text"] * 2000}),
    ],
)
async def test_what_is_in_a_long_body_is_looked_at_and_rendered_beside_the_loop(
    make_site: SiteMaker, noted: list[bool], monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    here = threading.get_ident()
    threads: list[int] = []
    async with make_site() as site:
        await call(site.app, CHAT, HELLO)
        await call(site.app, CHAT, HELLO)
        assert noted == [False, True]
        del noted[:]
        for name in ("_asked", "_message"):
            original = getattr(parsing, name)

            def noting(*arguments: Any, original: Any = original, **named: Any) -> Any:
                threads.append(threading.get_ident())
                return original(*arguments, **named)

            monkeypatch.setattr(parsing, name, noting)
        answer = await call(site.app, path, body)
        assert answer.status in (400, 413)
        assert here not in threads
        assert threads
        assert True not in noted
