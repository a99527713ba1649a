"""Render an answer's deltas in dialects whose answers consist of blocks (dialects/blocks.py)."""

from pilotlight.dialects.blocks import BlockWriter, NewWriter
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.engine.text.formats import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from pilotlight.runtime.api.builders.logprobs import text_logprobs
from pilotlight.runtime.generation.generator import Generation, Generator
from pilotlight.runtime.generation.output_processor import Delta
from pilotlight.wire.chat import ChatLogprobs


class BlockBuilder:
    """Builder of one answer.
    If another site started the answer, the writer first replays what the client already has."""

    def __init__(self, new_writer: NewWriter, request: ValidGeneration, generator: Generator) -> None:
        self._writer = new_writer(request)
        self._request = request
        self._models = generator.models.registry
        self._delivery = request.delivery
        self._has_started = False

    @property
    def num_events(self) -> int:
        return self._writer.num_events

    def events(self, delta: Delta, generation: Generation) -> bytes:
        events = b""
        if not self._has_started:
            self._has_started = True
            if self._delivery.choices:
                self._go_on(generation)
            else:
                events = self._writer.started(generation.usage)
        return events + self._written(delta)

    def ending(self, generation: Generation) -> bytes:
        assert generation.finish_reason is not None
        return self._writer.finish(generation.usage, generation.finish_reason, generation.stop_string)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        (delta,) = deltas
        assert delta.finish_reason is not None
        self._written(delta)
        return self._writer.finish_whole(generation.usage, delta.finish_reason, generation.stop_string)

    def _written(self, delta: Delta) -> bytes:
        """Return the events of a delta, with the log-probabilities of its texts if requested."""
        logprobs = iter(self._text_logprobs(delta)) if self._request.sampling.num_logprobs is not None else None
        return b"".join(
            self._writer.add("text", part.text, next(logprobs).content)
            if logprobs is not None and isinstance(part, TextPart)
            else _written(self._writer, part)
            for part in delta.parts
        )

    def _text_logprobs(self, delta: Delta) -> list[ChatLogprobs]:
        tokenizer = self._models.tokenizer(self._request.model)
        return text_logprobs([part.text for part in delta.parts if isinstance(part, TextPart)], delta.tokens, tokenizer)

    def _go_on(self, generation: Generation) -> None:
        self._writer.started(generation.usage)
        for part in generation.shown_before(0):
            _written(self._writer, part)
        self._writer.num_events = self._delivery.num_events


def _written(writer: BlockWriter, part: Part) -> bytes:
    match part:
        case TextPart():
            return writer.add("text", part.text)
        case ReasoningPart():
            return writer.add("reasoning", part.text)
        case CallPart():
            return writer.add_call(part.name, part.id)
        case ArgumentsPart():
            return writer.add("call", part.text)
    return b""
