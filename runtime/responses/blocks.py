"""An engine's answer, piece by piece, to a dialect whose answers are blocks (dialects/blocks.py)."""

from dialects.blocks import BlockWriter, NewWriter
from dialects.requests import ValidGeneration
from engine.formats import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from runtime.generation import Generation, Generator
from runtime.output_processor import Delta


class BlockBuilder:
    """One answer. Of one that another site began, the writer is first told what that one has shown."""

    def __init__(self, new_writer: NewWriter, request: ValidGeneration, generator: Generator) -> None:
        self._writer = new_writer(request)
        self._delivery = request.delivery
        self._has_begun = False

    @property
    def num_events(self) -> int:
        return self._writer.num_events

    def events(self, delta: Delta, generation: Generation) -> bytes:
        events = b""
        if not self._has_begun:
            self._has_begun = True
            if self._delivery.choices:
                self._go_on(generation)
            else:
                events = self._writer.started(generation.usage)
        return events + b"".join(_written(self._writer, part) for part in delta.parts)

    def ending(self, generation: Generation) -> bytes:
        assert generation.finish_reason is not None
        return self._writer.finish(generation.usage, generation.finish_reason, generation.stop_string)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        (delta,) = deltas
        assert delta.finish_reason is not None
        for part in delta.parts:
            _written(self._writer, part)
        return self._writer.finish_whole(generation.usage, delta.finish_reason, generation.stop_string)

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
