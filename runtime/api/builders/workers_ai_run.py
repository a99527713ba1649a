"""Workers AI's `run`: the task of a body, and the object or events of a generation.

If JSON was requested, `response` is an object; in a stream, or if the answer was cut short, it is text.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import orjson
from msgspec import UNSET

from pilotlight.dialects.openai_responses import ResponsesWriter
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.dialects.workers_ai_api import ValidRun
from pilotlight.engine.text.formats import CallPart, ReasoningPart, TextPart
from pilotlight.runtime.api.builders.blocks import BlockBuilder
from pilotlight.runtime.generation.generator import Generation, Generator
from pilotlight.runtime.generation.output_processor import Delta
from pilotlight.wire.chat import FinishReason, Usage
from pilotlight.wire.sse import DONE, encode_event
from pilotlight.wire.workers_ai import Call, Envelope, TextResult

_encoder = msgspec.json.Encoder()


def task_of(raw: bytes) -> Literal["run", "response", "embedding", "reranking", "decision"]:
    """Return the kind of a request's body: generation, Responses body, embeddings, scores or decisions.

    Most bodies have none of the distinguishing words, so they are not decoded here. Invalid JSON is refused later.
    """
    if not any(word in raw for word in (b'"text"', b'"input"', b'"contexts"', b'"questions"')):
        return "run"
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "run"
    if not isinstance(values, dict) or values.get("messages") is not None or values.get("prompt") is not None:
        return "run"
    if values.get("contexts") is not None:
        return "reranking"
    if values.get("questions") is not None:
        return "decision"
    if values.get("input") is not None:
        return "response"
    return "embedding" if values.get("text") is not None else "run"


class RunResponsesWriter(ResponsesWriter):
    """Writer of a Responses object in the envelope of `run`, with all of its text in one field."""

    def _response(self, status: str, usage: Usage | None, finish_reason: FinishReason | None) -> dict[str, Any]:
        text = "".join(block.text for block in self.blocks if block.kind == "text")
        return {**super()._response(status, usage, finish_reason), "output_text": text}

    def whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        response = msgspec.Raw(super().whole(usage, finish_reason, stop_string))
        return _encoder.encode(Envelope(response))


def run_responses(request: ValidGeneration, generator: Generator) -> BlockBuilder:
    return BlockBuilder(RunResponsesWriter, request, generator)


class RunBuilder:
    num_events = 0

    def __init__(self, request: ValidRun, generator: Generator) -> None:
        self._is_document = request.constraint is not None and request.constraint.kind == "json_schema"

    def events(self, delta: Delta, generation: Generation) -> bytes:
        return b"".join(encode_event(_encoder.encode(result)) for result in _results(delta))

    def ending(self, generation: Generation) -> bytes:
        last = TextResult("", usage=generation.usage, finish_reason=generation.finish_reason or UNSET)
        return encode_event(_encoder.encode(last)) + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        (delta,) = deltas
        calls = tuple(_call(call, arguments) for call, arguments in delta.calls)
        result = TextResult(
            delta.text, calls or UNSET, generation.usage, delta.reasoning or UNSET, delta.finish_reason or UNSET
        )
        if not self._is_document or calls or not _is_json(delta.text):
            return _encoder.encode(Envelope(result))
        return _encoder.encode(Envelope({**msgspec.to_builtins(result), "response": msgspec.Raw(delta.text.encode())}))


def _results(delta: Delta) -> Iterator[TextResult]:
    """Yield an event for each part of a delta; a tool call is a single event."""
    calls = iter(delta.calls)
    for part in delta.parts:
        if isinstance(part, TextPart):
            yield TextResult(part.text)
        elif isinstance(part, ReasoningPart):
            yield TextResult("", reasoning_content=part.text)
        elif isinstance(part, CallPart):
            yield TextResult("", (_call(*next(calls)),))


def _call(call: CallPart, arguments: str) -> Call:
    """Return a call with its arguments as JSON, or as a JSON string if they are not valid JSON."""
    if not _is_json(arguments):
        arguments = msgspec.json.encode(arguments).decode()
    # An event has one line. A line end in JSON can only be white space.
    return Call(call.name, msgspec.Raw(arguments.replace("\r", " ").replace("\n", " ").encode()))


def _is_json(text: str) -> bool:
    """Tell whether a text is one JSON document. Numbers that exceed a float are accepted."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except ValueError:
        return False
    return True
