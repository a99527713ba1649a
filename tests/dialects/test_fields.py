"""All fields of OpenAI's chats, completions and embeddings, and the additional fields of vLLM.

Each field has an effect, or is accepted without one, or is refused by name. Unknown fields are listed in a response header.
"""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from pilotlight.dialects.embeddings_api import parse_embedding
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_completions import parse_completion
from pilotlight.wire.errors import ApiError

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
LOGPROBS = {"logprobs": True}
STREAM = {"stream": True}

# A field in a table: a value that has an effect, and the other fields that it requires.
Row = tuple[Any, dict[str, Any]]
SAMPLING: dict[str, Row] = {
    "max_tokens": (5, {}), "min_tokens": (2, {}), "temperature": (0.3, {}), "top_p": (0.5, {}), "top_k": (3, {}), "min_p": (0.1, {}),
    "seed": (7, {}), "presence_penalty": (0.5, {}), "frequency_penalty": (0.5, {}), "repetition_penalty": (1.1, {}),
    "logit_bias": ({"5": 1.0}, {}), "stop": ("x", {}), "stop_token_ids": ([5], {}), "ignore_eos": (True, {}), "stream": (True, {}),
    "n": (2, {}), "stream_options": ({"include_usage": True}, STREAM), "prompt_logprobs": (2, {}),
    "response_format": ({"type": "json_object"}, {}), "structured_outputs": ({"regex": "a+"}, {}), "guided_json": ({"type": "object"}, {}),
    "guided_regex": ("a+", {}), "guided_choice": (["a"], {}), "guided_grammar": ('start: "a"', {}),
    "regex": ("a+", {}), "json_schema": ({"type": "object"}, {}), "include_stop_str_in_output": (True, {}), "truncate_prompt_tokens": (-1, {}),
    "cache_salt": ("x", {}),
}  # fmt: skip
MEANT: dict[str, dict[str, Row]] = {
    "chat": {
        **SAMPLING, "model": ("other", {}), "messages": ([{"role": "user", "content": "Ho"}], {}), "max_completion_tokens": (5, {}),
        "logprobs": (True, {}), "top_logprobs": (2, LOGPROBS), "tools": ([], {}), "tool_choice": ("required", {}),
        "parallel_tool_calls": (False, {}), "reasoning_effort": ("max", {}), "verbosity": ("low", {}),
        "chat_template_kwargs": ({"enable_thinking": False}, {}),
        "add_generation_prompt": (False, {}), "return_token_ids": (True, {}),
        "continue_final_message": (True, {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}]}),
    },
    "completion": {**SAMPLING, "model": ("other", {}), "prompt": ("Ho", {}), "echo": (True, {}), "logprobs": (2, {}), "return_token_ids": (True, {}),
                   "suffix": ("x", {})},
    "embedding": {"model": ("other", {}), "input": ("Ho", {}), "encoding_format": ("base64", {}), "dimensions": (4, {})},
}  # fmt: skip
BOOKKEEPING: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}, "prediction": {"type": "content", "content": "x"},
    "spaces_between_special_tokens": False,
}  # fmt: skip
# For each field a value without effect, and a value that is refused.
REFUSED: dict[str, tuple[Any, Any]] = {
    "audio": (None, {"voice": "x"}), "modalities": (["text"], ["text", "audio"]), "functions": ([], [{"name": "f"}]),
    "function_call": ("none", "auto"), "web_search_options": (None, {}), "moderation": (None, {"model": "m"}),
    "best_of": (1, 2), "suffix": ("", "x"), "use_beam_search": (False, True), "bad_words": ([], ["x"]), "allowed_token_ids": ([], [1]),
    "include_stop_str_in_output": (False, True), "truncate_prompt_tokens": (-1, 5), "documents": ([], [{"text": "x"}]),
    "chat_template": ("", "{{ x }}"), "prompt_embeds": (None, "x"), "return_tokens_as_token_ids": (False, True),
    "skip_special_tokens": (True, False), "cache_salt": ("", "x"), "regex": ("", "[0-9]"), "ebnf": ("", "x"), "grammar": ("", "x"),
    "json_schema": ({}, {"type": "object"}),
}  # fmt: skip
NAMED = ("request_id", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs", "priority", "a_field_of_tomorrow")

PARSERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "chat": (parse_chat, CHAT),
    "completion": (parse_completion, {"model": "m", "prompt": "Hi"}),
    "embedding": (parse_embedding, {"model": "m", "input": "Hi"}),
}


def parsed(kind: str, **fields: Any) -> Any:
    parse, body = PARSERS[kind]
    return parse(orjson.dumps({**body, **fields}), lambda name: name)


def asked(request: Any) -> dict[str, Any]:
    """Return the fields of a request, without its random name."""
    return {name: getattr(request, name) for name in request.__struct_fields__ if name != "answer_name"}


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, rows in MEANT.items() for field in rows])
def test_a_field_with_a_meaning_changes_what_is_asked_for(kind: str, field: str) -> None:
    value, beside = MEANT[kind][field]
    request = parsed(kind, **{**beside, field: value})
    without = {name: other for name, other in beside.items() if name != field}
    assert request.ignored == ()
    assert asked(request) != asked(parsed(kind, **without))


@pytest.mark.parametrize("kind", PARSERS)
def test_bookkeeping_changes_nothing_and_is_not_named(kind: str) -> None:
    assert asked(parsed(kind, **BOOKKEEPING)) == asked(parsed(kind))


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in PARSERS for field in REFUSED if field not in MEANT[kind]]
)
def test_what_is_not_done_here_is_refused_unless_it_asks_for_nothing(kind: str, field: str) -> None:
    neutral, value = REFUSED[field]
    assert asked(parsed(kind, **{field: neutral})) == asked(parsed(kind))
    with pytest.raises(ApiError, match="is not supported with this value: ") as refusal:
        parsed(kind, **{field: value})
    assert (refusal.value.word, refusal.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize("kind", PARSERS)
def test_unknown_fields_are_named(kind: str) -> None:
    assert parsed(kind, **dict.fromkeys(NAMED, 1)).ignored == NAMED


def test_as_many_answers_as_are_ranked_are_all_of_them() -> None:
    assert parsed("completion", n=3, best_of=3).n == 3
    with pytest.raises(ApiError, match="answers are not ranked"):
        parsed("completion", n=2, best_of=3)


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_tools_of_a_chat_may_have_the_form_of_responses(kind: str) -> None:
    tool = {"name": "f", "description": "d", **({"parameters": {"type": "object"}} if kind == "function" else {})}
    flat, nested = {"type": kind, **tool}, {"type": kind, kind: tool}
    assert asked(parsed("chat", tools=[flat])) == asked(parsed("chat", tools=[nested]))
    assert parsed("chat", tools=[{**flat, "new": 1}]).ignored == (f"tools[0].{kind}.new",)
    with pytest.raises(ApiError, match="name"):
        parsed("chat", tools=[{**flat, "name": 7}])
