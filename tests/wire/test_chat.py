"""The shapes of chat completions: optional fields, usage, round trips, and what official clients accept."""

import json

import msgspec
from msgspec import Raw

from pilotlight.wire.chat import (
    ChatChunk,
    ChatCompletion,
    Choice,
    ChunkChoice,
    CompletionTokensDetails,
    FunctionCall,
    FunctionDelta,
    Message,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from pilotlight.wire.workers_ai import Call, Envelope, TextResult


def encoded(value: object) -> object:
    return json.loads(msgspec.json.encode(value))


def test_absent_and_null_are_distinguished() -> None:
    assert encoded(ChatChunk("c", 1, "m", (ChunkChoice(MessageDelta(content="a")),))) == {
        "id": "c",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": None}],
        "object": "chat.completion.chunk",
    }
    with_usage = encoded(ChatChunk("c", 1, "m", (), None))
    assert isinstance(with_usage, dict)
    assert with_usage["usage"] is None


def test_usage_adds_up() -> None:
    usage = Usage.of(prompt_tokens=10, completion_tokens=5, cached_tokens=8)
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (15, 8)


def test_every_count_of_an_answer_stands_in_its_own_field() -> None:
    plain = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 2,
            "rejected_prediction_tokens": 3,
        },
    }
    assert encoded(Usage.of(10, 5, 8, 1, 2, 3)) == plain
    assert Usage.of(10, 5, 8).completion_tokens_details == CompletionTokensDetails(0, 0, 0)
    with_image = {**plain, "prompt_tokens_details": {"cached_tokens": 8, "image_tokens": 4}}
    assert encoded(Usage.of(10, 5, 8, 1, 2, 3, 4)) == with_image


def test_whole_answers_and_chunks_survive_the_round_trip() -> None:
    function = FunctionCall("f", '{"a": 1}')
    message = Message(None, (ToolCall("call_1", function),))
    whole = ChatCompletion("c", 1, "m", (Choice(message, "tool_calls"),), Usage.of(1, 2, 0))
    assert msgspec.json.decode(msgspec.json.encode(whole), type=ChatCompletion) == whole
    chunk = ChatChunk(
        "c",
        1,
        "m",
        (ChunkChoice(MessageDelta(tool_calls=(ToolCallDelta(0, FunctionDelta("f", "{"), "call_1"),)), "tool_calls"),),
    )
    assert msgspec.json.decode(msgspec.json.encode(chunk), type=ChatChunk) == chunk


def test_official_models_accept_the_shapes() -> None:
    from openai.types.chat import ChatCompletion as Official
    from openai.types.chat import ChatCompletionChunk as OfficialChunk

    whole = ChatCompletion("c", 1, "m", (Choice(Message("Hi"), "stop"),), Usage.of(1, 2, 1))
    assert Official.model_validate_json(msgspec.json.encode(whole)).choices[0].message.content == "Hi"
    chunk = ChatChunk("c", 1, "m", (ChunkChoice(MessageDelta(role="assistant", content="")),), Usage.of(1, 2, 1))
    assert OfficialChunk.model_validate_json(msgspec.json.encode(chunk)).usage.total_tokens == 3


def test_the_native_envelope() -> None:
    result = TextResult("", (Call("f", Raw(b'{"a":1}')),))
    assert encoded(Envelope(result)) == {
        "result": {"response": "", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        "success": True,
        "errors": [],
        "messages": [],
    }
