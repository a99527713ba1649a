"""Validation errors name the parameter in the notation of the API, and every invalid body gets such an error."""

import subprocess
import sys
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.dialects.anthropic import MessagesBody
from pilotlight.dialects.body.bodies import Body, names_of
from pilotlight.dialects.body.further_parameters import HARMLESS, UNSUPPORTED
from pilotlight.dialects.body.invalid_values import unsupported
from pilotlight.dialects.embeddings_api import EmbeddingBody
from pilotlight.dialects.openai_chat import ChatBody
from pilotlight.dialects.openai_completions import CompletionBody
from pilotlight.dialects.openai_responses import ResponsesBody
from pilotlight.dialects.workers_ai_api import RunBody, RunEmbeddingBody
from pilotlight.wire.errors import ApiError
from tests.dialects.body.test_bodies import BASES, TABLES, over, parse

BODIES: dict[str, type[Body]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "run": RunBody,
    "embedding": EmbeddingBody,
    "run_embedding": RunEmbeddingBody,
    "messages": MessagesBody,
    "responses": ResponsesBody,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 9}, "temperature: must be at most 5"),
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"temperature": "0.5"}, "temperature: must be a number"),
        ({"top_p": -1}, "top_p: must be at least 0"),
        ({"repetition_penalty": 0.001}, "repetition_penalty: must be at least 0.01"),
        ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
        ({"seed": 2**63}, "seed: must be at most 9223372036854775807"),
        ({"stream": 1}, "stream: must be true or false"),
        ({"model": 3}, "model: must be a string"),
        ({"stop": 3}, "stop: must be a string or a list of strings"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids: may have at most 64 items"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]: must be at least 0"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name: must not be empty"),
        (
            {"tools": [{"type": "function", "function": {"name": "f" * 129}}]},
            "tools[0].function.name: may have at most 128 characters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 3}}]},
            "tools[0].function.strict: must be true or false",
        ),
        ({"tools": [{"type": "code"}]}, 'tools[0].type: must be "custom" or "function"'),
        (
            {"messages": [{"role": "wizard"}]},
            'messages[0].role: must be "assistant", "developer", "system", "tool" or "user"',
        ),
        ({"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages[0].audio: must be null or left out"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            'messages[0].content: must be a string or a list of parts such as {"type": "text", "text": "..."}',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}]},
            "messages[0].tool_calls[0].function.arguments: must be a string or an object",
        ),
        ({"messages": [{"content": "a"}]}, "messages[0].role is required"),
    ],
)
def test_a_mistake_is_said_by_its_place_and_what_to_change(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse("chat", over(BASES["chat"], orjson.dumps(change).decode()))
    assert refusal.value.message == message


def test_a_value_of_a_table_is_named_by_its_key() -> None:
    with pytest.raises(ApiError) as refusal:
        parse("responses", over(BASES["responses"], '{"metadata": {"a": "b", "turn": 1}}'))
    assert (refusal.value.param, refusal.value.message) == ("metadata.turn", "metadata.turn: must be a string")


def test_of_several_mistakes_the_first_declared_is_said() -> None:
    bad = '{"n": 0, "messages": [{"content": [3], "role": "wizard"}], "top_k": -2, "max_tokens": 0}'
    for without, param in (("", "max_tokens"), ("max_tokens", "top_k"), ("max_tokens top_k", "messages[0].role")):
        change = {name: value for name, value in orjson.loads(bad).items() if name not in without.split()}
        with pytest.raises(ApiError) as refusal:
            parse("chat", over(BASES["chat"], orjson.dumps(change).decode()))
        assert refusal.value.param == param


NAMES = sorted(
    {*UNSUPPORTED, *HARMLESS, "temprature", "type", "function"}.union(*(names_of(body) for body in BODIES.values()))
)
EDGES: list[Any] = [
    None, True, False, 0, 0.0, -0.0, 1, 1.0, -1, 17, 0.5, 5.5, -2.5, 1e300, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), "", "a", "user", "assistant",
    "function", "auto", "text", [], [""], [1], [-1], [[1]], ["a", 1], [None], [{}], {}, {"5": 1}, {"type": "text", "text": "a"}, {"role": "user"},
    [{"role": "assistant", "content": "a", "x": 1}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"type": "function", "function": {"name": "f", "strict": 0}}], [{"name": "f"}], {"include_usage": True},
]  # fmt: skip
VALUES = st.sampled_from(EDGES) | st.recursive(
    st.sampled_from(EDGES) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=6,
)


def test_a_sentence_does_not_contain_its_code() -> None:
    assert str(unsupported("videos are not read")) == "videos are not read"


@given(st.sampled_from(sorted(BODIES)), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_whatever_is_sent_is_taken_or_refused_with_a_place(endpoint: str, change: dict[str, Any]) -> None:
    """A second check finds the error of a refused body. If it found none, the exception would not be an ApiError."""
    try:
        parse(endpoint, over(BASES[endpoint], orjson.dumps(change).decode()))
    except ApiError as error:
        place, said = error.param, error.message
    else:
        return
    assert place is not None
    assert len(said) > len(place)


@pytest.mark.process
def test_good_bodies_load_nothing_that_explains_bad_ones() -> None:
    good = [
        (endpoint, over(BASES[endpoint], change)) for endpoint, table in TABLES.items() for change in dict(table)["ok"]
    ]
    program = (
        "import sys; from pilotlight.dialects.embeddings_api import parse_embedding; from pilotlight.dialects.openai_chat import parse_chat\n"
        "from pilotlight.dialects.openai_completions import parse_completion\n"
        "from pilotlight.dialects.workers_ai_api import parse_run, parse_run_embedding; from pilotlight.dialects.anthropic import parse_messages\n"
        "from pilotlight.dialects.openai_responses import parse_response\n"
        "def known(name): return name\n"
        "parsers = {'chat': parse_chat, 'messages': parse_messages, 'responses': parse_response,\n"
        "    'completion': parse_completion, 'embedding': parse_embedding,\n"
        "    'run': lambda raw, known: parse_run(raw, known, 'tiny'),\n"
        "    'run_embedding': lambda raw, known: parse_run_embedding(raw, known, 'tiny')}\n"
        f"for endpoint, raw in {good!r}: parsers[endpoint](raw, known)\n"
        "print([name for name in ('pilotlight.dialects.body.validation_errors', 'difflib', 'pydantic') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
