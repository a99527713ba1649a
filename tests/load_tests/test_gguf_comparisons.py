"""The comparison of answers with those of llama.cpp: the first difference of greedy answers, and valid tool calls and JSON."""

import json
from typing import Any

import pytest

from load_tests.scenarios.gguf_agreement import Answer, Parting, parting
from load_tests.scenarios.gguf_calls import Case, cases, judged


def test_equal_answers_do_not_part() -> None:
    answer = Answer([5, 6], [{5: -0.1}, {6: -0.2}])
    assert parting(answer, answer) is None


def test_answers_part_at_their_first_different_token_by_what_each_engine_thinks_of_both() -> None:
    ours = Answer([5, 6, 1], [{5: -0.1}, {6: -0.50, 7: -0.75}, {1: 0.0}])
    theirs = Answer([5, 7, 2], [{5: -0.1}, {7: -0.25, 9: -3.0}, {2: 0.0}])
    assert parting(ours, theirs) == Parting(place=1, ours_nats=0.25, theirs_nats=2.75)


def test_every_prompt_is_asked_in_two_ways() -> None:
    asked = list(cases(200))
    ways = [case.way for case in asked]
    assert len(asked) == 400
    assert {way: ways.count(way) for way in ways} == {
        "tools, auto": 100,
        "tools, required": 100,
        "JSON, asked in words": 100,
        "JSON, response_format": 100,
    }
    assert len({json.dumps(case.body["messages"]) for case in asked}) == 200


def _answer(finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish_reason, "message": message}]}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GOOD = _call("weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (_answer(tool_calls=[GOOD, GOOD]), "valid"),
        (_answer(tool_calls=[GOOD, _call("weather", '{"city": 5}')]), "not by its schema"),
        (_answer(tool_calls=[_call("weather", '{"city')]), "not JSON"),
        (_answer(tool_calls=[_call("time", "{}")]), "an unknown tool"),
        (_answer(content="It rains."), "no call"),
        (_answer("length", tool_calls=[GOOD]), "too long"),
    ],
)
def test_a_call_is_valid_if_its_tool_was_offered_and_its_arguments_follow_the_schema(
    answer: dict[str, Any], outcome: str
) -> None:
    assert judged(Case("tools, auto", {}, {"weather": SCHEMA}), answer) == outcome


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ('{"city": "Oslo"}', "valid"),
        ('```json\n{"city": "Oslo"}\n```', "not JSON"),
        ("[]", "not by its schema"),
        (None, "not JSON"),
    ],
)
def test_json_is_valid_if_it_is_the_whole_answer_and_follows_the_schema(content: str | None, outcome: str) -> None:
    assert judged(Case("JSON, asked in words", {}, {"": SCHEMA}), _answer(content=content)) == outcome
