"""A chat's pieces as `chat.completion` objects and `chat.completion.chunk` events."""

import secrets

from msgspec import UNSET, UnsetType

from engine.formats import Part, TextPart, ToolCallPart
from runtime.answers.logprobs import chat_logprobs, prompt_logprobs
from runtime.answers.naming import Named, encoder
from runtime.generation import Generation, Generator
from runtime.streaming import CarriedToken, Piece
from runtime.validation import ValidChat
from wire.chat import (
    ChatCompletion,
    ChatLogprobs,
    Choice,
    Chunk,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionCall,
    Message,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from wire.sse import DONE, encode_event


class ChatAnswer(Named):
    def __init__(self, request: ValidChat, generator: Generator) -> None:
        super().__init__(request, generator, "chatcmpl")
        self._include_usage = request.include_usage
        self._wants_logprobs = request.sampling.num_logprobs is not None
        self._num_prompt_logprobs = request.num_prompt_logprobs

    def events(self, piece: Piece, generation: Generation) -> bytes:
        """One event per part. The last part's id is the last token whose text is complete; the finish has an event of its own."""
        shown = tuple(token for token in piece.tokens if token.is_shown)
        events = b""
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            events = self._event(piece.choice, Delta(role="assistant", content=""))
        num_calls = piece.num_calls_before
        for position, part in enumerate(piece.parts):
            is_last = position == len(piece.parts) - 1
            events += self._event(piece.choice, self._delta(part, num_calls), shown if is_last else ())
            num_calls += isinstance(part, ToolCallPart)
        if piece.finish_reason is not None:
            rest = piece.tokens if not piece.parts else piece.tokens[len(shown) :]
            last = piece.tokens[-1].position if piece.tokens else None
            events += self._event(piece.choice, Delta(), rest, piece.finish_reason, last)
        return events

    def ending(self, generation: Generation) -> bytes:
        events = b""
        if self._include_usage:
            events = encode_event(self._chunk((), generation.usage))
        return events + encode_event(DONE)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        choices = tuple(map(self._choice, pieces))
        of_prompt: PromptLogprobs | UnsetType = UNSET
        if self._num_prompt_logprobs is not None:
            of_prompt = prompt_logprobs(
                generation.prompt, generation.prompt_logprobs, self._num_prompt_logprobs, self.tokenizer
            )
        return encoder.encode(ChatCompletion(self.id, self.created, self.model, choices, generation.usage, of_prompt))

    def _choice(self, piece: Piece) -> Choice:
        assert piece.finish_reason is not None
        calls = tuple(ToolCall(_call_id(), FunctionCall(call.name, call.arguments)) for call in piece.calls)
        message = Message(None if calls and not piece.text else piece.text, calls or UNSET)
        return Choice(message, piece.finish_reason, self._logprobs(piece.tokens), piece.choice)

    def _event(
        self,
        choice: int,
        delta: Delta,
        tokens: tuple[CarriedToken, ...] = (),
        finish_reason: FinishReason | None = None,
        last: int | None = None,
    ) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        chunk = self._chunk((ChunkChoice(delta, finish_reason, logprobs, choice),), None)
        return encode_event(chunk, self.event_id(choice, tokens[-1].position if tokens else last))

    def _chunk(self, choices: tuple[ChunkChoice, ...], usage: Usage | None) -> bytes:
        told: Usage | UnsetType | None = usage if self._include_usage else UNSET
        return encoder.encode(Chunk(self.id, self.created, self.model, choices, told))

    def _delta(self, part: Part, index: int) -> Delta:
        if isinstance(part, TextPart):
            return Delta(content=part.text)
        return Delta(tool_calls=(ToolCallDelta(index, _call_id(), FunctionCall(part.name, part.arguments)),))

    def _logprobs(self, tokens: tuple[CarriedToken, ...]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.tokenizer) if self._wants_logprobs else None


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
