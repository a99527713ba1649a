"""Options of a request for its chat template and its tokens: variables, an open last message, token ids, usage in every chunk."""

from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from tests.asgi import call
from tests.fakes import EOS, ids, says
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}[{{ reasoning_effort }}|{{ enable_thinking }}|{{ mood }}]"
)
ASKED = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": " Once upon "}


async def prompt_of(site: Site, **fields: Any) -> str:
    answer = await call(site.app, CHAT, {"model": "tiny", "messages": [ASKED], **fields})
    assert answer.status == 200, answer.json
    return Tokenizer.from_directory(Path(site.config.models[0].source)).decode(site.engine.submits[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>Hi</><assistant>[||]"),
        ({"chat_template_kwargs": {"mood": "gay", "unread": 1}}, "<user>Hi</><assistant>[||gay]"),
        ({"reasoning_effort": "high"}, "<user>Hi</><assistant>[high|True|]"),
        ({"reasoning_effort": "none"}, "<user>Hi</><assistant>[none|False|]"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "<user>Hi</><assistant>[none|True|]",
        ),
        ({"add_generation_prompt": False}, "<user>Hi</>[||]"),
        ({"messages": [ASKED, BEGUN], "continue_final_message": True}, "<user>Hi</><assistant>Once upon"),
        ({"messages": [ASKED, BEGUN]}, "<user>Hi</><assistant>Once upon</><assistant>[||]"),
    ],
)
async def test_a_prompt_is_rendered_as_the_request_says(
    make_site: SiteMaker, model_directory: Path, fields: dict[str, Any], prompt: str
) -> None:
    (model_directory / "chat_template.jinja").write_text(TEMPLATE)
    async with make_site() as site:
        assert await prompt_of(site, **fields) == prompt


@pytest.mark.parametrize(
    ("source", "prompts"),
    [
        ("{{ enable_thinking }}", ("", "True", "False")),
        ("{{ thinking }}", ("", "True", "False")),
        ("{{ thinking_mode }}", ("", "enabled", "disabled")),
        ("{{ thinking_budget if thinking_budget is defined else -1 }}", ("-1", "-1", "0")),
    ],
)
async def test_reasoning_is_turned_on_and_off_by_the_variable_that_a_template_reads(
    make_site: SiteMaker, model_directory: Path, source: str, prompts: tuple[str, str, str]
) -> None:
    (model_directory / "chat_template.jinja").write_text("{{ messages[0].content }}:" + source)
    async with make_site() as site:
        for fields, prompt in zip(
            ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "none"}), prompts, strict=True
        ):
            assert await prompt_of(site, **fields) == f"Hi:{prompt}"


async def test_an_effort_is_refused_that_the_format_has_no_word_for(
    make_site: SiteMaker, model_directory: Path
) -> None:
    (model_directory / "chat_template.jinja").write_text(TEMPLATE + "{# <|channel|> #}")
    async with make_site() as site:
        for effort in ("low", "medium", "high"):
            assert f"[{effort}|True|]" in await prompt_of(site, reasoning_effort=effort)
        for fields in ({"reasoning_effort": "minimal"}, {"chat_template_kwargs": {"reasoning_effort": "none"}}):
            answer = await call(site.app, CHAT, {"model": "tiny", "messages": [ASKED], **fields})
            assert (answer.status, answer.json["error"]["param"]) == (400, "reasoning_effort")
            assert "use low, medium or high" in answer.json["error"]["message"]


async def test_a_last_message_that_the_template_rewrites_cannot_be_continued(
    make_site: SiteMaker, model_directory: Path
) -> None:
    (model_directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    body = {"model": "tiny", "messages": [ASKED, BEGUN], "continue_final_message": True}
    async with make_site() as site:
        answer = await call(site.app, CHAT, body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert "cannot be continued" in answer.json["error"]["message"]


@pytest.mark.parametrize("begun", ["<", "end", "m", "n ", "<|im_end|>", " user"])
async def test_an_open_last_message_ends_with_its_text_although_the_template_writes_the_same_text_after_it(
    site: Site, begun: str
) -> None:
    messages = [ASKED, {"role": "assistant", "content": begun}]
    prompt = await prompt_of(site, messages=messages, continue_final_message=True)
    assert prompt == f"user\nHi\nassistant\n{begun}"


async def test_token_ids_are_those_of_prompt_and_answer(site: Site) -> None:
    site.engine.script = says("aé")
    body = {"model": "tiny", "messages": [ASKED], "return_token_ids": True}
    whole = (await call(site.app, CHAT, body)).json
    expected = [*ids("aé"), EOS]
    assert whole["choices"][0]["token_ids"] == expected
    assert whole["prompt_token_ids"] == list(site.engine.submits[0].prompt_token_ids)
    chunks = (await call(site.app, CHAT, {**body, "stream": True})).events[:-1]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == expected
    assert [chunk.get("prompt_token_ids") for chunk in chunks][:2] == [whole["prompt_token_ids"], None]


async def test_usage_is_in_every_chunk_where_it_was_asked_for(site: Site) -> None:
    site.engine.script = [step for output in says("abc") for step in (output, 0.01)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "messages": [ASKED], "stream": True, "stream_options": options}
    chunks = (await call(site.app, CHAT, body)).events[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 4


async def test_a_completions_token_ids_are_those_of_each_prompt_and_answer(site: Site) -> None:
    site.engine.script = says("aé")
    body = {"model": "tiny", "prompt": ["Hi", "Ho!"], "return_token_ids": True}
    whole = (await call(site.app, "/v1/completions", body)).json
    prompts = [list(submit.prompt_token_ids) for submit in site.engine.submits]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*ids("aé"), EOS]] * 2
    chunks = (await call(site.app, "/v1/completions", {**body, "stream": True})).events[:-1]
    for choice in (0, 1):
        of_it = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice]
        assert [token for part in of_it for token in part["token_ids"]] == [*ids("aé"), EOS]
        assert [part.get("prompt_token_ids") for part in of_it] == [prompts[choice], *[None] * (len(of_it) - 1)]


async def test_usage_is_in_every_chunk_of_a_completion_too(site: Site) -> None:
    site.engine.script = [step for output in says("abc") for step in (output, 0.01)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": "Hi", "stream": True, "stream_options": options}
    counts = [
        chunk["usage"]["completion_tokens"] for chunk in (await call(site.app, "/v1/completions", body)).events[:-1]
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 4


@pytest.mark.parametrize(
    ("said", "prompt"),
    [({"content": ""}, ":Hm."), ({"content": "I look."}, ":"), ({"content": "I look.", "tool_calls": []}, ":Hm.")],
)
async def test_earlier_reasoning_is_given_to_templates_that_call_it_thinking(
    make_site: SiteMaker, model_directory: Path, said: dict[str, Any], prompt: str
) -> None:
    """The template of gpt-oss refuses a message that has text and reasoning before its calls."""
    (model_directory / "chat_template.jinja").write_text(":{% for m in messages %}{{ m.thinking }}{% endfor %}")
    call_made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call_made], **said}
    async with make_site() as site:
        assert await prompt_of(site, messages=[ASKED, turn]) == prompt


async def test_a_template_of_parts_loses_no_message(make_site: SiteMaker, model_directory: Path) -> None:
    parts = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    source = "{% for message in messages %}[{{ message.role }}]" + parts + "{% endfor %}"
    (model_directory / "chat_template.jinja").write_text(source)
    async with make_site() as site:
        for content in ("Hello there", [{"type": "text", "text": "Hello there"}]):
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
            assert await prompt_of(site, messages=messages) == "[system]Be brief.[user]Hello there"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{# <|tool_call|> #}", '[user]Hi[assistant]<|tool_call|>[{"name": "f", "arguments": {"a": 1}}][tool]2'),
        ("", '[user]Hi[assistant]<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>[tool]2'),
    ],
)
async def test_calls_that_a_template_leaves_out_are_text_in_the_models_format(
    make_site: SiteMaker, model_directory: Path, source: str, prompt: str
) -> None:
    source += "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (model_directory / "chat_template.jinja").write_text(source)
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    async with make_site() as site:
        assert (
            await prompt_of(site, messages=[ASKED, turn, {"role": "tool", "tool_call_id": "1", "content": "2"}])
            == prompt
        )
