"""Rendering of conversations: outside the event loop, and in a child process unless the template is trusted."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pilotlight.dialects.body import parsing
from pilotlight.dialects.requests import Conversation
from pilotlight.engine.api import guarded_pool
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.guarded_pool import JobEndedError
from pilotlight.engine.text.chat_template import BrokenTemplateError, ChatTemplate, ChatTemplateError
from pilotlight.engine.text.formats import Speller
from pilotlight.engine.text.formats.tools import hermes
from pilotlight.engine.text.formats.tools.json_lists import GRANITE
from pilotlight.engine.tokenizer.tokenizer import SHIELD_BEGIN, Tokenizer, unmarked
from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.runtime.generation.rendering import MAX_CHILDREN, Rendering
from pilotlight.runtime.models import checkpoint_children
from pilotlight.runtime.models.text import TextSide
from pilotlight.runtime.timings import SiteTimings
from tests.asgi import call, eventually
from tests.fakes import byte_tokenizer
from tests.runtime.conftest import SiteMaker

CHAT, RUN = "/ai/v1/chat/completions", "/client/v4/accounts/acc1/ai/run/@test/tiny"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
SAID = Conversation(({"role": "user", "content": "Hi"},))
BYE = Conversation(({"role": "user", "content": "Bye"},))
KINDS = pytest.mark.parametrize("is_trusted", [True, False])


def made(source: str, cpu_s: float = 10.0, *, spell: Speller = hermes.spell, is_trusted: bool = False) -> Rendering:
    tokenizer = Tokenizer.from_json(byte_tokenizer().to_str(), {})
    return Rendering(tokenizer, ChatTemplate({"default": source}, {}), cpu_s, spell, is_trusted=is_trusted)


@pytest.fixture(autouse=True)
def _without_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits, so that a busy machine ends only the work whose CPU time is limited."""
    monkeypatch.setattr(guarded_pool, "SLACK", 1000.0)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each conversation that this process renders whether it is rendered in the event loop's thread."""
    here, seen, original = threading.get_ident(), [], ChatTemplate.render

    def noting(self: ChatTemplate, *arguments: Any, **named: Any) -> str:
        seen.append(threading.get_ident() == here)
        return original(self, *arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", noting)
    return seen


async def test_our_own_templates_render_short_conversations_at_once_and_others_in_a_thread(noted: list[bool]) -> None:
    ours = made("{{ messages[0].content }}", is_trusted=True)
    for is_short in (True, True, False, True):
        assert await ours.text(SAID, is_short=is_short) == "Hi"
    assert noted == [True, True, False, True]


async def test_a_checkpoints_template_is_never_run_in_this_process(noted: list[bool]) -> None:
    foreign = made("{{ messages[0].content }}{{ nothing }}")
    for is_short in (True, False):
        assert await foreign.text(SAID, is_short=is_short) == "Hi"
    assert noted == []


async def test_embedded_models_alone_are_trusted(model_directory: Path, noted: list[bool]) -> None:
    await TextSide.from_directory(EMBEDDED / "ember").rendering.text(SAID, is_short=True)
    assert noted == [True]
    await TextSide.from_directory(model_directory).rendering.text(SAID, is_short=True)
    assert noted == [True], "the second template was rendered in a child"


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


@pytest.mark.process
async def test_a_template_that_joins_arguments_to_text_has_them_as_text() -> None:
    written = "{{ 'f' + messages[1].tool_calls[0].function.arguments }}"
    assert unmarked(await made(written).text(CALLED, is_short=True)) == 'f{"a": "\u00e9 <|im_end|>"}'
    assert SHIELD_BEGIN in await made(written).text(CALLED, is_short=True)
    listed = (
        "{% for key, value in messages[1].tool_calls[0].function.arguments.items() %}{{ key }}{{ value }}{% endfor %}"
    )
    assert unmarked(await made(listed).text(CALLED, is_short=True)) == "a\u00e9 <|im_end|>"


@pytest.mark.process
async def test_a_conversation_that_the_template_refuses_either_way_is_refused_in_its_first_words() -> None:
    refusing = "{{ raise_exception('alternate! ' ~ messages[1].tool_calls[0].function.arguments.a) }}"
    with pytest.raises(ChatTemplateError, match="alternate! \u00e9 <"):
        await made(refusing).text(CALLED, is_short=True)


SINGLE = (
    "{% for m in messages %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endif %};{% endfor %}"
)


@KINDS
async def test_a_template_with_one_call_per_message_gets_each_call_before_its_result(is_trusted: bool) -> None:
    """Several calls that Llama 3 made at once were refused in the next request, whose history contains them."""
    calls = [{"id": name, "function": {"name": "f", "arguments": {"a": name}}} for name in "abb"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"r{name}"} for name in "bac"]
    assistant = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    conversation = Conversation((*SAID.messages, assistant, *results, *BYE.messages))
    text = await made(SINGLE, is_trusted=is_trusted).text(conversation, is_short=True)
    assert text == "user:Hi;assistant:I look.a;tool:ra;assistant:b;tool:rb;assistant:b;tool:rc;user:Bye;"


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
    as_it_is = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    assert await made(as_it_is).text(said, is_short=True) == "".join(f"{role}{i}" for i, role in enumerate(roles))


async def test_a_system_message_that_the_template_would_leave_out_amid_messages_is_folded_into_the_users() -> None:
    leaves_out = REFUSES_LATER.replace('{{ raise_exception("the system message must come first") }}', "{% continue %}")
    said = Conversation(tuple({"role": role, "content": role} for role in ("user", "assistant", "system", "user")))
    assert await made(leaves_out).text(said, is_short=True) == "u:user;a:assistant;u:system\n\nuser;"
    without_tools = (
        "{% for message in messages %}{% if message.role != 'tool' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    said = Conversation(tuple({"role": role, "content": role} for role in ("user", "assistant", "tool", "user")))
    with pytest.raises(ChatTemplateError, match="leaves out messages of the role tool"):
        await made(without_tools).text(said, is_short=True)


SHOWN = "{% for m in messages %}{{ m.role[0] }}:{{ CONTENT }};{% endfor %}"
NAMED = "f(' ~ m.tool_calls[0].function.arguments.a ~ ')"
ALTERNATING = """{% set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"""
LISTED = '[{"name": "f", "arguments": {"a": "<e>"}}]'


@KINDS
@pytest.mark.parametrize(
    ("content", "spell", "bare", "said"),
    [
        ("m.content ~ (' NAMED' if m.tool_calls else '')", hermes.spell, " f(<e>)", "I look. f(<e>)"),
        ("m.content if m.content is not none else 'NAMED'", hermes.spell, "f(<e>)", "I look.;a:f(<e>)"),
        ("'NAMED' if m.tool_calls else m.content", hermes.spell, "f(<e>)", "I look.;a:f(<e>)"),
        ("m.content", GRANITE.spell, f"<|tool_call|>{LISTED}", f"I look.\n<|tool_call|>{LISTED}"),
    ],
)
async def test_every_call_and_text_of_a_history_is_shown(
    content: str, spell: Speller, bare: str, said: str, is_trusted: bool
) -> None:
    """Templates show content of calls only if it is None, or no text beside calls, or no calls."""
    template = made(SHOWN.replace("CONTENT", content.replace("NAMED", NAMED)), spell=spell, is_trusted=is_trusted)
    for text, expected in (("", bare), ("I look.", said)):
        called = {**CALLED.messages[1], "content": text}
        called["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": "<e>"}}}]
        history = Conversation((*SAID.messages, called, {"role": "tool", "content": "42"}, *BYE.messages))
        assert await template.text(history, is_short=True) == f"u:Hi;a:{expected};t:42;u:Bye;"


async def test_a_call_without_text_cannot_be_continued() -> None:
    for content in (
        "m.content",
        "m.content if m.content is not none else 'NAMED'",
        "'NAMED' if m.tool_calls else m.content",
    ):
        template = made(SHOWN.replace("CONTENT", content.replace("NAMED", NAMED)))
        with pytest.raises(ChatTemplateError):
            await template.text(Conversation(CALLED.messages, continues_last=True), is_short=True)


async def test_text_beside_a_call_is_dropped_only_if_the_template_accepts_it_in_no_form() -> None:
    template = made(ALTERNATING + SHOWN.replace("CONTENT", f"'{NAMED}' if m.tool_calls else m.content"))
    called = {**CALLED.messages[1], "content": "I look."}
    answered = (*CALLED.messages[:1], called, {"role": "tool", "content": "42"})
    said = Conversation((*answered, {"role": "assistant", "content": "It is 42."}, *BYE.messages))
    text = await template.text(said, is_short=True)
    assert unmarked(text).strip() == "u:Hi;a:f(\u00e9 <|im_end|>);t:42;a:It is 42.;u:Bye;"
    text = await template.text(Conversation(answered), is_short=True)
    assert unmarked(text).strip() == "u:Hi;a:I look.;a:f(\u00e9 <|im_end|>);t:42;"


async def test_a_system_message_that_the_template_refuses_anywhere_is_folded_into_the_users() -> None:
    refuses = REFUSES_LATER.replace(" and not loop.first", "")
    said = Conversation(tuple({"role": role, "content": role} for role in ("system", "user", "assistant", "user")))
    assert await made(refuses).text(said, is_short=True) == "u:system\n\nuser;a:assistant;u:user;"


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPS, "it needs more than 0.2 s of CPU time"),
        (GROWS, "memory"),
        ("{{ 'a' | center(10 ** 9) }}", "memory"),
        ("{{ [messages] | tojson(indent=10 ** 10) }}", "memory"),
    ],
)
async def test_a_template_that_takes_too_much_is_ended_alone(source: str, reason: str) -> None:
    """No other form of the conversation is tried: in one, the system's message would be part of the user's."""
    source = "{% for m in messages %}{% if m.content == 'more' %}" + source + "{% endif %}{{ m.content }}{% endfor %}"
    hostile = made(source, cpu_s=0.2 if LOOPS in source else 5.0)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=reason):
            await hostile.text(Conversation((*SAID.messages, {"role": "system", "content": "more"})), is_short=True)
    assert await hostile.text(BYE, is_short=True) == "Bye"


async def test_a_template_that_cannot_be_compiled_within_limits_is_broken() -> None:
    endless = made("{% if true %}" + "{{ x }}" * 400_000 + "{% endif %}", cpu_s=0.3)
    for _ in range(2):
        with pytest.raises(BrokenTemplateError, match=r"cannot be compiled: it needs more than 0\.3 s of CPU time"):
            await endless.text(SAID, is_short=True)
    assert endless.is_checked
    assert endless.why_broken is not None


@pytest.mark.process
async def test_a_child_that_is_killed_from_outside_costs_a_conversation_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign, original = made("{{ messages[0].content }}"), checkpoint_children.children().submit
    ends: list[Any] = ["lost", None]

    def submit(job: Any) -> Any:
        submitted = original(job)
        if ends and (reason := ends.pop(0)) is not None:
            submitted = type(submitted)()
            submitted.set_exception(JobEndedError(reason, "ended"))
        return submitted

    await foreign.check()
    monkeypatch.setattr(checkpoint_children.children(), "submit", submit)
    assert await foreign.text(SAID, is_short=True) == "Hi"
    for reasons in (["lost", "lost"], ["deadline"]):
        ends[:] = reasons
        with pytest.raises(EngineError) as refused:
            await foreign.text(SAID, is_short=True)
        assert refused.value.code == "overloaded"


async def test_marks_do_not_show_in_a_templates_refusal() -> None:
    refusing = made("{{ raise_exception('no: ' + messages[0].content) }}")
    with pytest.raises(ChatTemplateError, match=r"no: <\|im_end\|>!") as refused:
        await refusing.text(Conversation(({"role": "user", "content": "<|im_end|>!"},)), is_short=True)
    assert SHIELD_BEGIN not in str(refused.value)


@pytest.mark.process
async def test_a_site_whose_template_loops_answers_all_else(make_site: SiteMaker, model_directory: Path) -> None:
    source = "{% if messages[0].content == 'Hi' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    (model_directory / "chat_template.jinja").write_text(source)
    async with make_site(timings=SiteTimings(render_cpu_s=0.3)) as site:
        places = site.app.site.models.states["tiny"].text.rendering._renderer._places
        chats = [asyncio.create_task(call(site.app, CHAT, HELLO)) for _ in range(2 * MAX_CHILDREN)]
        await eventually(places.locked)
        assert (await call(site.app, "/livez")).status == 200
        assert (await call(site.app, "/v1/completions", {"model": "tiny", "prompt": "Once"})).status == 200
        assert not any(chat.done() for chat in chats)
        # the template of another model
        assert await made("{{ messages[0].content }}").text(SAID, is_short=True) == "Hi"
        for answer in await asyncio.gather(*chats):
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
            assert "was stopped while it rendered this conversation" in answer.json["error"]["message"]


@pytest.mark.process
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
        assert noted == []
