"""Hermes-style tool calls out of a stream, however it is cut."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.formats import Part, TextPart, ToolCallPart, tool_format_of
from engine.formats.hermes import HermesParser
from engine.formats.pieces import held_suffix

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
MADE = ToolCallPart("f", '{"a": "b"}')


def parse(*chunks: str, is_cut: bool = False) -> list[Part]:
    """The parts of a whole text, neighbouring contents joined."""
    parser = HermesParser()
    parts = [part for chunk in chunks for part in parser.push(chunk)]
    parts += parser.finish(is_cut=is_cut)
    assert parser.held_characters == 0
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, TextPart) and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("plain text", [TextPart("plain text")]),
        ("trailing space \n", [TextPart("trailing space \n")]),
        (CALL, [MADE]),
        (CALL + "\n", [MADE]),
        (f"Let me look.\n\n{CALL}", [TextPart("Let me look."), MADE]),
        (f"{CALL}\n{CALL}", [MADE, MADE]),
        (f"{CALL} Done.", [MADE, TextPart("Done.")]),
        ("a < b and <tool", [TextPart("a < b and <tool")]),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCallPart("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCallPart("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\u00e9"}}</tool_call>', [ToolCallPart("f", '{"a": "\u00e9"}')]),
        # Inside a JSON string a tag is text.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>!',
            [ToolCallPart("f", '{"a": "</tool_call>"}'), TextPart("!")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\\\\\"</tool_call><tool_call>{\\\\"}}</tool_call>',
            [ToolCallPart("f", '{"a": "\\\\\\"</tool_call><tool_call>{\\\\"}')],
        ),
        # Arguments stay as they were written.
        (
            '<tool_call>{"arguments": {"a":1e999, "b": 1.0,"c": 123456789012345678901234567890}, "name": "f"}</tool_call>',
            [ToolCallPart("f", '{"a":1e999, "b": 1.0,"c": 123456789012345678901234567890}')],
        ),
        # A tag in prose does not hold up what comes behind it.
        (f"Write <tool_call> first.\n{CALL}", [TextPart("Write <tool_call> first."), MADE]),
        (f"<tool_call>\n{CALL}", [TextPart("<tool_call>"), MADE]),
        # A quote too few, and one too many.
        (f'<tool_call>{{"name": "f}}</tool_call> {CALL}', [TextPart('<tool_call>{"name": "f}</tool_call>'), MADE]),
        (f'<tool_call>{{"name": "f""}}</tool_call>{CALL}', [TextPart('<tool_call>{"name": "f""}</tool_call>'), MADE]),
        # A model that stops before the closing tag has still called.
        ('<tool_call>\n{"name": "f", "arguments": {}}', [ToolCallPart("f", "{}")]),
    ],
)
def test_calls_and_content_are_told_apart(text: str, expected: list[Part]) -> None:
    assert parse(text) == expected
    assert parse(*text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        "x <tool_call>{}</tool_call> y",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>',
        '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2000 + "}</tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    assert parse(text) == [TextPart(text)]
    assert parse(*text) == [TextPart(text)]


def test_a_good_call_follows_a_bad_one() -> None:
    bad = "<tool_call>{</tool_call>"
    assert parse(bad + CALL) == [TextPart(bad), MADE]


SAMPLES = [
    f"Let me look.\n\n{CALL}\n{CALL} Done.",
    'a < b <tool_call> {"name": "f", "arguments": {"a": "\\"</tool_call>\u00e9\U0001f600"}}\n</tool_call>\n x <tool',
    '<tool_call>{"name": "f"</tool_call> then <tool_call>[</tool_call>' + CALL,
    f'<tool_call>{{"name": "f, "x": "\\"}}</tool_call>\n{CALL}',
]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_cut_between_any_two_chunks_changes_nothing(text: str, is_cut: bool) -> None:
    expected = parse(text, is_cut=is_cut)
    assert parse(*text, is_cut=is_cut) == expected
    for end in range(len(text)):
        assert parse(text[:end], text[end:], is_cut=is_cut) == expected
        assert parse(*text[:end], text[end:], is_cut=is_cut) == expected


@pytest.mark.parametrize("text", SAMPLES[:2])
def test_an_answer_that_is_cut_anywhere_shows_no_markup(text: str) -> None:
    whole = parse(text, is_cut=True)
    for end in range(len(text)):
        shown = parse(text[:end], is_cut=True)
        *before, last = shown or [TextPart("")]
        assert before == whole[: len(before)]
        same = whole[len(before)]
        assert last == same or (
            isinstance(last, TextPart) and isinstance(same, TextPart) and same.text.startswith(last.text.rstrip())
        )
        assert not any("tool" in part.text for part in shown if isinstance(part, TextPart))


def test_a_call_that_is_whole_when_the_answer_is_cut_is_a_call() -> None:
    assert parse(CALL.removesuffix("</tool_call>"), is_cut=True) == [MADE]
    assert parse(CALL.removesuffix("call>"), is_cut=True) == []


PIECES = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool_call>{}</tool_call>", " ", "\n", "text", "<", "{", '"name"', '"', "\\"]
)


@given(pieces=st.lists(PIECES | st.text(max_size=5), max_size=8), seed=st.integers(0, 2**32))
def test_any_chunking_gives_the_same_parts(pieces: list[str], seed: int) -> None:
    text = "".join(pieces)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(*chunks) == parse(text) == parse(*text)


@given(pieces=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "a", " ", "<", "\n"]), max_size=10))
def test_without_a_call_nothing_is_swallowed(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(part.text for part in parse(*text) if isinstance(part, TextPart)) == text


@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.integers())),
)
def test_arguments_come_back_as_the_same_object(name: str, arguments: dict[str, object]) -> None:
    body = json.dumps({"name": name, "arguments": arguments})
    (call,) = parse(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, ToolCallPart)
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_content_is_not_held_longer_than_needed() -> None:
    parser = HermesParser()
    assert parser.push("Hello") == [TextPart("Hello")]
    assert parser.push(" <to") == []
    assert parser.held_characters == 4
    assert parser.push("day") == [TextPart(" <today")]
    assert parser.held_characters == 0


def test_the_format_is_chosen_by_the_template() -> None:
    chosen = tool_format_of(ChatTemplate({"default": "{{ '<tool_call>' }}"}, {}))
    assert chosen is not None
    assert chosen.name == "hermes"
    assert tool_format_of(ChatTemplate({"default": "plain"}, {})) is None


def test_held_suffix_finds_the_longest_beginning() -> None:
    assert held_suffix("abc<", ("<tool>",)) == 1
    assert held_suffix("abc<tool", ("<tool>",)) == 5
    assert held_suffix("aa", ("aab", "ab")) == 2
    assert held_suffix("abc", ("x",)) == 0
    assert held_suffix("", ("x",)) == 0
