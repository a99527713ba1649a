"""Custom tools, whose input is free text, become functions with one parameter."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.custom_tools import InputReader, function_of, input_of


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200)))
def test_an_input_is_read_alike_however_its_arguments_are_cut(text: str, is_ascii: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader = InputReader()
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    read = [reader.push(arguments[start:end]) for start, end in pairwise(places)]
    assert "".join(read) + reader.finish() == reader.text == text


@given(st.text(), st.integers(0, 200))
def test_an_input_that_was_cut_is_a_beginning_of_the_whole(text: str, cut: int) -> None:
    arguments = json.dumps({"input": text})[: len('{"input": "') + cut]
    assert text.startswith(input_of(arguments))


@pytest.mark.parametrize("arguments", ["", "{", '{"patch": "a"}', "free text", "[1]", '{"input": 3}'])
def test_arguments_of_another_form_are_the_input_as_they_are(arguments: str) -> None:
    assert input_of(arguments) == arguments


def test_a_regular_expression_is_the_inputs_pattern_and_a_grammar_is_described() -> None:
    regex, is_enforced = function_of("f", "Does it.", {"type": "grammar", "syntax": "regex", "definition": "a|b"})
    assert is_enforced
    assert regex.strict
    assert regex.parameters is not None
    assert regex.parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:a|b)$"}}
    lark, is_enforced = function_of("f", "Does it.", {"type": "grammar", "syntax": "lark", "definition": "start: /a/"})
    assert (is_enforced, lark.strict) == (False, None)
    assert lark.description == "Does it.\n\nThe input must match this grammar in Lark:\nstart: /a/"


@pytest.mark.parametrize(
    "format", [{}, "text", {"type": "grammar"}, {"type": "grammar", "syntax": "bnf", "definition": "a"}]
)
def test_a_format_of_another_kind_is_refused(format: object) -> None:
    with pytest.raises(ValidationError, match="must be"):
        function_of("f", None, format)
