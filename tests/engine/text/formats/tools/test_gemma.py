"""Gemma 4's calls and reasoning."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pilotlight.engine.text.formats import AnswerRules, CallableTool, Thinking
from pilotlight.engine.text.formats.tools.thinking import TAGS as THINK_TAGS
from tests.engine.text.formats.reading import assert_same_however_cut, parts_of, read, told
from tests.engine.text.formats.test_grammars import writer

CHANNEL = next(tags for tags in THINK_TAGS if tags.label)
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "edits": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"old": {"type": "string"}, "at": {"$ref": "#/$defs/place"}},
                "required": ["old", "at"],
                "additionalProperties": False,
            },
        },
        "mode": {"enum": ["all", 1, None, True]},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "size": {"type": ["integer", "null"]},
        "none": {"type": "array", "maxItems": 0},
    },
    "required": ["edits", "note", "size", "none"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"], "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.parametrize("tags", [True, False])
def test_a_nested_schema_is_enforced_in_the_formats_own_notation(tmp_path: Path, tags: bool) -> None:
    made = writer(tmp_path, "gemma4", tags=tags)
    rules, checked = AnswerRules((CallableTool("edit", NESTED),), is_single=True), 0
    for seed in range(10):
        if (tokens := made.tokens(rules, Thinking.CLOSED, seed)) is None:
            continue
        ((kind, name, arguments),) = told(parts_of(made.answers.parser(Thinking.CLOSED, {"edit": NESTED}), tokens))
        assert (kind, name) == ("call", "edit")
        jsonschema.validate(json.loads(arguments), NESTED)
        checked += 1
    assert checked or not tags  # drawn tokens hardly ever spell the end of a string


@pytest.mark.parametrize(
    "schema", [{"enum": [{}]}, {"type": "array", "uniqueItems": True}, {"type": "array", "minItems": "x"}]
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_key(tmp_path: Path, schema: dict[str, Any]) -> None:
    made = writer(tmp_path, "gemma4", tags=True)
    tool = CallableTool("edit", {"type": "object", "properties": {"a": schema}})
    with pytest.raises(ValueError, match="'a'"):
        made.answers.grammar(Thinking.CLOSED, AnswerRules((tool,)))


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<|channel>thought\nHm.\n<channel|>Hi", Thinking.MAYBE, [("reasoning", "Hm."), ("text", "Hi")]),
        ("<|channel>thought\n<channel|>Hi", Thinking.MAYBE, [("text", "Hi")]),
        ("Hi", Thinking.MAYBE, [("text", "Hi")]),
        ("Hm.\n<channel|>Hi", Thinking.OPEN, [("reasoning", "Hm."), ("text", "Hi")]),
        (
            "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{}<tool_call|>",
            Thinking.MAYBE,
            [("reasoning", "Hm."), ("call", "f", "{}")],
        ),
    ],
)
@pytest.mark.parametrize("tags", [True, False])
def test_reasoning_is_in_a_channel(text: str, thinking: Thinking, expected: list[tuple[str, ...]], tags: bool) -> None:
    assert_same_however_cut("gemma4", text, expected, tags=tags, think=CHANNEL, thinking=thinking)


def test_a_string_that_is_not_closed_ends_with_its_call() -> None:
    text = '<|tool_call>call:f{a:<|"|>x<tool_call|>Hi'
    assert read("gemma4", text) == [("call", "f", '{"a":"x'), ("text", "Hi")]
