"""Hermes-style tool calls from a stream, however it is cut."""

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pilotlight.engine.text.formats import ArgumentsPart, Part, TextPart, Thinking
from tests.engine.text.formats.reading import Read, assert_same_however_cut, chunked, format_of, parts_of, read, told

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
UNMARKED = '{"name": "f", "arguments": {"a": "b"}}'
PIECES = ("<tool_call>", "</tool_call>", "{", "a", " ", "<", "\n")
QUOTING = '{"name": "f", "arguments": {"a": "```json\\n{}```"}}'
MADE = ("call", "f", '{"a": "b"}')
TAGS = pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])


def text(said: str) -> Read:
    return ("text", said)


@TAGS
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", []),
        ("plain text", [text("plain text")]),
        ("trailing space \n", [text("trailing space \n")]),
        (CALL, [MADE]),
        (CALL + "\n", [MADE]),
        (f"Let me look.\n\n{CALL}", [text("Let me look."), MADE]),
        (f"{CALL}\n{CALL}", [MADE, MADE]),
        (f"{CALL} Done.", [MADE, text("Done.")]),
        ("a < b and <tool", [text("a < b and <tool")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("call", "f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\u00e9"}}</tool_call>', [("call", "f", '{"a": "\u00e9"}')]),
        # Inside a JSON string a tag is text.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>!',
            [("call", "f", '{"a": "</tool_call>"}'), text("!")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\\\\\"</tool_call><tool_call>{\\\\"}}</tool_call>',
            [("call", "f", '{"a": "\\\\\\"</tool_call><tool_call>{\\\\"}')],
        ),
        # Arguments stay as they were written.
        (
            '<tool_call>{"arguments": {"a":1e999, "b": 1.0,"c": 123456789012345678901234567890}, "name": "f"}</tool_call>',
            [("call", "f", '{"a":1e999, "b": 1.0,"c": 123456789012345678901234567890}')],
        ),
        # A tag in prose does not delay the text after it.
        (f"Write <tool_call> first.\n{CALL}", [text("Write <tool_call> first."), MADE]),
        (f"<tool_call>\n{CALL}", [text("<tool_call>"), MADE]),
        # A missing quote, and an extra one.
        (f'<tool_call>{{"name": "f}}</tool_call> {CALL}', [text('<tool_call>{"name": "f}</tool_call>'), MADE]),
        (f'<tool_call>{{"name": "f""}}</tool_call>{CALL}', [text('<tool_call>{"name": "f""}</tool_call>'), MADE]),
        # A missing brace, and an extra one.
        (f'<tool_call>{{"name": "f", "arguments": {{}}</tool_call>{CALL}', [("call", "f", "{}"), MADE]),
        (f'<tool_call>{{"name": "f", "arguments": {{}}}}}}\n</tool_call>{CALL}', [("call", "f", "{}"), MADE]),
        # An answer that stops before the closing tag still contains the call.
        ('<tool_call>\n{"name": "f", "arguments": {}}', [("call", "f", "{}")]),
        ('<tool_call>\n{"name": "f", "arguments": {}', [("call", "f", "{}")]),
        # Qwen2.5-Coder leaves the tags out, and often writes a code block.
        (UNMARKED, [MADE]),
        (f"\n{UNMARKED}\n{UNMARKED}\n", [MADE, MADE]),
        (f"```json\n{UNMARKED}\n```", [MADE]),
        (f"```json\n{UNMARKED}\n{UNMARKED}\n```\n\nDone.", [MADE, MADE, text("Done.")]),
        (f"```\n{UNMARKED}\n```\n```json\n{UNMARKED}", [MADE, MADE]),
        (f"<tools>\n{UNMARKED}\n</tools>\n{CALL}", [MADE, MADE]),
        # Its template asks for two braces.
        (f"{{{UNMARKED}}}", [MADE]),
        (f"```json\n{{{UNMARKED}}}\n```\n{{{UNMARKED}}}", [MADE, MADE]),
        (f"<tool_call>\n{{{UNMARKED}}}\n</tool_call>", [MADE]),
        # After text a block of JSON is a call if the answer ends with it, and else an example.
        (f"I look.\n```json\n{UNMARKED}\n```", [text("I look."), MADE]),
        (f"I look.\n\n```json\n{UNMARKED}\n{{{UNMARKED}}}\n``` \n", [text("I look."), MADE, MADE]),
        (f"I look.\n```json\n{QUOTING}\n```", [text("I look."), ("call", "f", '{"a": "```json\\n{}```"}')]),
        (f"As in\n```json\n{UNMARKED}\n```\nhere.", [text(f"As in\n```json\n{UNMARKED}\n```\nhere.")]),
        (f"As in\n```json\n{UNMARKED}\n```\n{CALL}", [text(f"As in\n```json\n{UNMARKED}\n```"), MADE]),
        (f"As in\n```json\n[{UNMARKED}]\n```", [text(f"As in\n```json\n[{UNMARKED}]\n```")]),
        (f"As in\n```json\n{UNMARKED}, x\n```", [text(f"As in\n```json\n{UNMARKED}, x\n```")]),
        ('As in\n```json\n{"name": "f"}\n```', [text('As in\n```json\n{"name": "f"}\n```')]),
        (
            'As in\n```json\n{"name": "Rome", "arguments": {}}\n```',
            [text('As in\n```json\n{"name": "Rome", "arguments": {}}\n```')],
        ),
        # A tool that is not offered cannot be called.
        (f"```python\n{UNMARKED}\n```", [text(f"```python\n{UNMARKED}\n```")]),
        ('```json\n{"name": "Rome", "arguments": {}}\n```', [text('```json\n{"name": "Rome", "arguments": {}}\n```')]),
        ('{"name": "f"} is JSON', [text('{"name": "f"} is JSON')]),
        ('{"name": "f", "arguments": 1}', [text('{"name": "f", "arguments": 1}')]),
        # Values that are not valid JSON.
        (
            '<tool_call>{"name": "f", "arguments": {"a": NaN, "b": [-Infinity, 01, +1], "c": True}}</tool_call>',
            [("call", "f", '{"a": "NaN", "b": ["-Infinity", "01", "+1"], "c": true}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800x\\ud83d\\ude00\\udfff"}}</tool_call>',
            [("call", "f", '{"a": "\\ufffdx\\ud83d\\ude00\\ufffd"}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo\\x"}}</tool_call>',
            [("call", "f", '{"a": "one\\ntwo\\\\x"}')],
        ),
    ],
)
def test_calls_and_text_are_distinguished_however_they_are_cut(said: str, expected: list[Read], tags: bool) -> None:
    assert_same_however_cut("hermes", said, expected, tags=tags)


@TAGS
@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>not json</tool_call>",
        "x <tool_call>{}</tool_call> y",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
        '<tool_call>{"city": "Paris"}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_as_it_was_written(said: str, tags: bool) -> None:
    assert read("hermes", said, tags=tags) == [text(said)]
    assert read("hermes", said, tags=tags, cuts=None) == [text(said)]


@TAGS
def test_a_good_call_follows_a_bad_one(tags: bool) -> None:
    bad = "<tool_call>{</tool_call>"
    assert_same_however_cut("hermes", bad + CALL, [text(bad), MADE], tags=tags)


def test_a_call_that_is_cut_has_no_end() -> None:
    assert read("hermes", CALL.removesuffix("}\n</tool_call>"), is_cut=True) == [MADE]
    assert read("hermes", CALL[:-17], is_cut=True) == [("cut", "f", '{"a": "')]
    assert read("hermes", CALL[:30], is_cut=True) == []


@given(pieces=st.lists(st.sampled_from([*PIECES, "```json\n", "```", '{"name": "f"', "}", '"']), max_size=12))
def test_without_a_call_nothing_is_swallowed(pieces: list[str]) -> None:
    said = "".join(pieces)
    assume(re.search(r'<tool_call>[\s{]*\{"name"', said) is None)
    assert read("hermes", said) == ([text(said)] if said else [])
    assert read("hermes", said, cuts=None) == ([text(said)] if said else [])


@given(
    name=st.text(min_size=1, max_size=100),
    arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.integers())),
    ascii=st.booleans(),
)
def test_arguments_come_back_as_the_same_object(name: str, arguments: dict[str, object], ascii: bool) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
    ((kind, called, given),) = read("hermes", f"<tool_call>{body}</tool_call>", tags=False)
    assert (kind, called, json.loads(given)) == ("call", name, arguments)


def test_text_is_not_held_longer_than_needed() -> None:
    answers, tokenizer = format_of("hermes", tags=False)
    parser = answers.parser(Thinking.CLOSED, {"f": {}})

    def push(said: str) -> list[str]:
        return [part.text for part in parser.push(tokenizer.id_of(said.encode())) if isinstance(part, TextPart)]

    assert push("Hello") == ["Hello"]
    assert push(" <to") == []
    assert parser.num_pushed - parser.num_settled == 4
    assert push("day") == [" <today"]
    assert parser.num_pushed == parser.num_settled


def test_a_tag_that_is_a_token_is_text_where_other_tokens_spell_it() -> None:
    answers, tokenizer = format_of("hermes")
    parser = answers.parser(Thinking.CLOSED, {"f": {}})
    said = CALL.encode()
    assert list(told(parts_of(parser, [tokenizer.id_of(said[:6]), tokenizer.id_of(said[6:])]))) == [text(CALL)]


def test_arguments_come_out_as_they_are_written() -> None:
    answers, tokenizer = format_of("hermes")
    parser = answers.parser(Thinking.CLOSED, {"f": {}})
    seen = [
        told_by(parser.push(tokenizer.id_of(chunk))) for chunk in chunked(CALL, ("<tool_call>", "</tool_call>"), None)
    ]
    arguments = [piece for piece in seen if piece]
    assert "".join(arguments) == '{"a": "b"}'
    assert len(arguments) == len('{"a": "b"}')


def told_by(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
