"""Templates that read content as a list of parts, as guard and vision models do, get lists; all others get strings."""

from typing import Any

import pytest

from pilotlight.engine.text.chat_template import ChatTemplate, ChatTemplateError
from pilotlight.engine.text.content_parts import (
    BARE_CALLS,
    CALLS,
    CALLS_WITH_TEXT,
    LATER_SYSTEM,
    lost_places,
    part_roles,
)
from pilotlight.engine.text.template_environment import ENVIRONMENT
from tests.fakes import CHATML

PARTS = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
CALLS_SHOWN = "{{ message.tool_calls[0].function.arguments | tojson if message.tool_calls }}"
LOOP = "{% for message in messages %}<{{ message.role }}>CONTENT" + CALLS_SHOWN + "{% endfor %}"
EITHER = "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
USERS_ALONE = "{% if message.role == 'user' %}" + PARTS + "{% else %}{{ message.content }}{% endif %}"
TOOLS_ALONE = "{% if message.role == 'tool' %}" + PARTS + "{% else %}{{ message.content }}{% endif %}"
FIRST = "{{ message['content'][0]['text'] | upper }}"
NO_SYSTEM = "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
ALL = {"user", "system", "assistant", "tool"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "roles"),
    [
        ("{{ message.content }}", set()),
        ("{{ message.content | trim | title }}", set()),
        ("{{ message.content | tojson }}", set()),
        (EITHER, set()),
        (PARTS, ALL),
        (FIRST, ALL),
        (USERS_ALONE, {"user"}),
        (TOOLS_ALONE, {"tool"}),
        (NO_SYSTEM, ALL - {"system"}),
        ("", set()),
        ("{{ raise_exception('never') }}", set()),
        ("{{ 1 // 0 }}", set()),
    ],
)
def test_a_role_s_content_is_a_list_of_parts_where_a_text_is_left_out(content: str, roles: set[str]) -> None:
    assert part_roles(ENVIRONMENT.from_string(LOOP.replace("CONTENT", content)), {}) == roles


def test_a_templates_special_tokens_are_there_when_it_is_probed() -> None:
    source = "{{ bos_token + '' }}" + LOOP.replace("CONTENT", PARTS)
    assert part_roles(ENVIRONMENT.from_string(source), {"bos_token": "<s>"}) == ALL
    assert part_roles(ENVIRONMENT.from_string(source), {}) == set()


@pytest.mark.parametrize("content", [PARTS, USERS_ALONE, TOOLS_ALONE, EITHER])
def test_every_text_of_a_conversation_is_rendered(content: str) -> None:
    messages = [dict(message) for message in CONVERSATION]
    rendered = ChatTemplate({"default": LOOP.replace("CONTENT", content)}, {}).render(messages)
    assert rendered == "<system>Be brief.<user>Weather?<assistant>{}<tool>sunny<assistant>It is sunny."
    assert messages == CONVERSATION, "rendering does not change the caller's messages"


def test_each_named_template_is_probed_for_itself() -> None:
    sources = {"default": LOOP.replace("CONTENT", "{{ message.content }}"), "tool_use": LOOP.replace("CONTENT", PARTS)}
    template = ChatTemplate(sources, {})
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        assert template.render([{"role": "user", "content": "Hi"}], tools) == "<user>Hi"


BLOCKS = """{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif part.type == 'thinking' %}[{{ part.thinking }}]{% endif %}{% endfor %}{% endif %}"""


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (
            "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}{{ message.content }}",
            "[Hm.]",
        ),
        ("{% if message.reasoning %}[{{ message.reasoning }}]{% endif %}{{ message.content }}", "[Hm.]"),
        ("{% if message.thinking %}[{{ message.thinking }}]{% endif %}{{ message.content }}", "[Hm.]"),
        (BLOCKS, "[Hm.]"),
        (
            BLOCKS.replace(
                "{% if part",
                "{% if part.type not in ['text', 'thinking'] %}{{ raise_exception('unknown') }}{% elif part",
            ),
            "[Hm.]",
        ),
        ("{{ message.content }}", ""),
        ("{{ message.content if message.content is string else message.content | tojson }}", ""),
        ("{{ message.content if message.content is string else raise_exception('no parts') }}", ""),
    ],
)
def test_earlier_reasoning_is_rendered_where_the_template_reads_it(content: str, shown: str) -> None:
    thoughts = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm.")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So.", **thoughts}]
    rendered = ChatTemplate({"default": LOOP.replace("CONTENT", content)}, {}).render(messages)
    assert rendered.replace("\n", "") == f"<user>Hi<assistant>{shown}So."


def test_parts_with_images_stay_as_they_are() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    source = LOOP.replace(
        "CONTENT", EITHER.replace("{% if part.type", "{% if part.type == 'image' %}[I]{% elif part.type")
    )
    assert ChatTemplate({"default": source}, {}).render([{"role": "user", "content": parts}]) == "<user>[I]What is it?"


def test_templates_of_texts_get_the_very_messages() -> None:
    template = ChatTemplate({"default": CHATML}, {})
    template.compile()
    assert set(template._part_roles.values()) == {frozenset()}


FIRST_SYSTEM = "{% if message.role != 'system' or loop.first %}{{ message.content }}{% endif %}"
NO_TOOLS = "{% if message.role != 'tool' %}{{ message.content }}{% endif %}"
TOOL = "messages of the role tool"
DECLARED_TOOLS = "{% if message.role != 'tool' or tools %}{{ message.content }}{% endif %}"


@pytest.mark.parametrize(
    ("content", "lost", "lost_with_tools"),
    [
        ("{{ message.content }}", set(), set()),
        (PARTS, set(), set()),
        (NO_SYSTEM, set(), set()),
        (FIRST_SYSTEM, {LATER_SYSTEM}, {LATER_SYSTEM}),
        (NO_TOOLS, {TOOL}, {TOOL}),
        (DECLARED_TOOLS, {TOOL}, set()),
        ("", set(), set()),
    ],
)
def test_places_are_found_whose_messages_a_template_leaves_out(
    content: str, lost: set[str], lost_with_tools: set[str]
) -> None:
    template = ENVIRONMENT.from_string(LOOP.replace("CONTENT", content))
    for with_tools, expected in ((False, lost), (True, lost_with_tools)):
        assert lost_places(template, {}, part_roles(template, {}), with_tools=with_tools) == expected


ARGUMENTS = "message.tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ("{{ message.content }}", {CALLS, BARE_CALLS, CALLS_WITH_TEXT}),
        ("{{ ARGUMENTS if message.tool_calls else message.content }}", {CALLS_WITH_TEXT}),
        ("{{ message.content or ARGUMENTS }}", {CALLS_WITH_TEXT}),
        ("{{ message.content if message.content is not none else ARGUMENTS }}", {CALLS, CALLS_WITH_TEXT}),
        ("{{ message.content if message.content is not none else '' + ARGUMENTS }}", {CALLS, CALLS_WITH_TEXT}),
        ("{{ message.content + (ARGUMENTS | tojson if message.tool_calls else '') }}", set()),
        ("{{ message.content + ('' + ARGUMENTS if message.tool_calls else '') }}", set()),
        ("{{ message.content }}{% for key in ARGUMENTS.items() %}{{ key }}{% endfor %}", set()),
        ("{{ message.content }}{% if message.tool_calls %}{{ raise_exception('no calls') }}{% endif %}", set()),
    ],
)
def test_calls_and_texts_beside_them_are_found_that_a_template_leaves_out(content: str, lost: set[str]) -> None:
    source = "{% for message in messages %}" + content.replace("ARGUMENTS", ARGUMENTS) + "{% endfor %}"
    template = ENVIRONMENT.from_string(source)
    for with_tools in (False, True):
        assert lost_places(template, {}, frozenset(), with_tools=with_tools) == lost


def test_a_conversation_of_which_a_message_would_be_left_out_is_refused() -> None:
    messages = [dict(message) for message in CONVERSATION]
    template = ChatTemplate({"default": LOOP.replace("CONTENT", NO_TOOLS)}, {})
    assert template.render(messages[:2]) == "<system>Be brief.<user>Weather?"
    with pytest.raises(ChatTemplateError, match="leaves out messages of the role tool; send none"):
        template.render(messages)
    template = ChatTemplate({"default": LOOP.replace("CONTENT", FIRST_SYSTEM)}, {})
    with pytest.raises(ChatTemplateError, match="leaves out system messages after the first message"):
        template.render([*messages[:2], {"role": "system", "content": "Be long."}])
    assert template.render([*messages[:2], {"role": "system", "content": ""}]), "an empty message leaves nothing out"
