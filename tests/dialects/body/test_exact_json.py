"""JSON numbers in a request keep their exact value, or the request is refused."""

import json

import msgspec
import pytest

from pilotlight.dialects.anthropic import tool_input
from pilotlight.dialects.body.answer_constraints import schema_constraint
from pilotlight.dialects.body.exact_json import exact_loads
from pilotlight.dialects.decisions.openai_decisions import parse_decisions
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.requests import Conversation
from pilotlight.edge_router.services.batches.lines import read_lines
from pilotlight.wire.errors import ApiError


@pytest.mark.parametrize(
    "text",
    [
        "1234567890123456789", "-9223372036854775808", "18446744073709551615", "[0.1234567890123456789012345]", '"123456789012345678901234567890"',
        '{"12345678901234567890123": 1}', "1e300", '"\\u00e9 12345678901234567890123"',
    ],
)  # fmt: skip
def test_numbers_of_64_bits_fractions_and_texts_are_what_they_are(text: str) -> None:
    assert exact_loads(text) == exact_loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "number", ["18446744073709551616", "-9223372036854775809", "1234567890123456789012345", "9" * 300]
)
def test_an_integer_that_would_become_another_one_is_refused_by_name(number: str) -> None:
    for text in (number, f'{{"a": [{number}]}}', f' {{"a": {{"b": -1, "c": {number}}}}}'):
        with pytest.raises(ApiError, match=number[:40]) as refused:
            exact_loads(text)
        assert refused.value.word == "invalid_request"


def test_every_reader_of_bodies_refuses_it() -> None:
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"const": 123456789012345678901}}}'
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'
    with pytest.raises(ApiError, match="123456789012345678901"):
        parse_chat(body.encode(), lambda name: name)
    with pytest.raises(ApiError, match="123456789012345678901"):
        schema_constraint('{"const": 123456789012345678901}')
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}'
    _, (fault,) = read_lines(line.encode(), "/v1/chat/completions")
    assert "123456789012345678901" in fault["message"]


def test_arguments_of_a_call_keep_numbers_of_any_size() -> None:
    text = '{"id": 1234567890123456789012345, "x": 0.10}'
    assert msgspec.json.encode(tool_input(text)) == text.encode()
    assert [tool_input(broken) for broken in ('{"id": 1', "[1]", "1", "", "{" * 5000)] == [{}] * 5


@pytest.mark.parametrize("depth", [300, 980])
@pytest.mark.parametrize("innermost", ["", "1234567890123456789"])
def test_what_is_nested_too_deep_to_be_written_again_is_refused(depth: int, innermost: str) -> None:
    deep = "[" * depth + innermost + "]" * depth
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {{"model": "m", "x": {deep}}}}}'
    _, (fault,) = read_lines(line.encode(), "/v1/completions")
    assert fault["message"] == "the JSON is nested too deep"


def test_an_ignored_field_that_is_nested_too_deep_is_refused() -> None:
    deep = "[" * 990 + "1234567890123456789" + "]" * 990
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "x": {deep}}}'
    with pytest.raises(ApiError, match="nested too deep"):
        parse_chat(body.encode(), lambda name: name)


def test_data_of_a_decision_keep_numbers_of_any_size() -> None:
    data = '{"input":{"id":1234567890123456789012345}}'
    part = f'{{"type": "input_json", "data": {data}}}'
    body = f'{{"model": "m", "input": [{{"role": "user", "content": [{part}]}}], "questions": [{{"type": "predicate", "instructions": "a"}}]}}'
    state = parse_decisions(body.encode(), lambda name: name).prompt
    assert isinstance(state, Conversation)
    assert state.messages[0]["content"] == data
