"""OpenAI's paths: /ai/v1/chat/completions, /ai/v1/completions, /ai/v1/models, and the same under /v1.

Knows how pieces are written as chunks and objects; refuses to know how they come about.
"""

import secrets
import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from engine.formats import Content, Part
from engine.tokenizer import Tokenizer
from runtime.generation import Generator
from runtime.routes.endpoint import Endpoint
from runtime.streaming import CarriedToken, Piece
from runtime.validation import ValidChat, ValidCompletion, ValidGeneration, parse_chat, parse_completion
from sites.config import LimitsConfig
from wire.chat import (
    ChatCompletion,
    ChatLogprobs,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    FunctionCall,
    Message,
    Model,
    ModelList,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from wire.errors import ApiError, Dialect
from wire.sse import DONE, encode_event

_encoder = msgspec.json.Encoder()


def openai_routes(generator: Generator, limits: LimitsConfig) -> list[BaseRoute]:
    resolve = generator.models.resolve

    def chat(raw: bytes, scope: Scope) -> ValidChat:
        return parse_chat(raw, resolve)

    def completion(raw: bytes, scope: Scope) -> ValidCompletion:
        return parse_completion(raw, resolve)

    ends = {"max_body_mib": limits.max_body_mib, "heartbeat_s": limits.heartbeat_s}
    chats = Endpoint(generator, Dialect.OPENAI, chat, ChatAnswer, **ends)
    completions = Endpoint(generator, Dialect.OPENAI, completion, CompletionAnswer, **ends)
    models = _ModelRoutes(generator)
    return [
        route
        for prefix in ("/ai/v1", "/v1")
        for route in (
            Route(f"{prefix}/chat/completions", chats, methods=["POST"]),
            Route(f"{prefix}/completions", completions, methods=["POST"]),
            Route(f"{prefix}/models", models.all),
            Route(f"{prefix}/models/{{id:path}}", models.one),
        )
    ]


class _Named:
    """An answer's identity, and the model's own tokenizer for its logprobs."""

    def __init__(self, request: ValidGeneration, generator: Generator, prefix: str) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = request.requested_model
        self._wants_logprobs = request.sampling.num_logprobs is not None
        self._models = generator.models
        self._name = request.model

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._models.tokenizer(self._name)
        assert tokenizer is not None, "an answer has pieces only once its model has been loaded"
        return tokenizer


class ChatAnswer(_Named):
    def __init__(self, request: ValidChat, generator: Generator) -> None:
        super().__init__(request, generator, "chatcmpl")
        self._include_usage = request.include_usage
        self._is_begun = False
        self._num_calls = 0

    def events(self, piece: Piece) -> bytes:
        """One event per part. The last part's id is the last token whose text is complete; the finish has an event of its own."""
        shown = tuple(token for token in piece.tokens if token.is_shown)
        events = b"" if self._is_begun else self._event(Delta(role="assistant", content=""))
        self._is_begun = True
        for position, part in enumerate(piece.parts):
            is_last = position == len(piece.parts) - 1
            events += self._event(self._delta(part), tokens=shown if is_last else ())
        if piece.finish_reason is not None:
            rest = piece.tokens if not piece.parts else piece.tokens[len(shown) :]
            last = piece.tokens[-1].position if piece.tokens else None
            events += self._event(Delta(), tokens=rest, finish_reason=piece.finish_reason, event_id=last)
        return events

    def ending(self, usage: Usage) -> bytes:
        events = b""
        if self._include_usage:
            events = encode_event(_encoder.encode(Chunk(self.id, self.created, self.model, (), usage)))
        return events + encode_event(DONE)

    def whole(self, piece: Piece, usage: Usage) -> bytes:
        assert piece.finish_reason is not None
        calls = tuple(ToolCall(_call_id(), FunctionCall(call.name, call.arguments)) for call in piece.calls)
        message = Message(None if calls and not piece.text else piece.text, calls or UNSET)
        choice = Choice(message, piece.finish_reason, self._logprobs(piece.tokens))
        return _encoder.encode(ChatCompletion(self.id, self.created, self.model, (choice,), usage))

    def _event(
        self,
        delta: Delta,
        tokens: tuple[CarriedToken, ...] = (),
        finish_reason: FinishReason | None = None,
        event_id: int | None = None,
    ) -> bytes:
        choice = ChunkChoice(delta, finish_reason, self._logprobs(tokens) if tokens else None)
        usage: UnsetType | None = None if self._include_usage else UNSET
        chunk = Chunk(self.id, self.created, self.model, (choice,), usage)
        return encode_event(_encoder.encode(chunk), tokens[-1].position if tokens else event_id)

    def _delta(self, part: Part) -> Delta:
        if isinstance(part, Content):
            return Delta(content=part.text)
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return Delta(tool_calls=(ToolCallDelta(index, _call_id(), FunctionCall(part.name, part.arguments)),))

    def _logprobs(self, tokens: tuple[CarriedToken, ...]) -> ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        tokenizer = self.tokenizer
        return ChatLogprobs(tuple(_token_logprob(token, tokenizer) for token in tokens if token.is_shown))


class CompletionAnswer(_Named):
    def __init__(self, request: ValidCompletion, generator: Generator) -> None:
        super().__init__(request, generator, "cmpl")
        self._include_usage = request.include_usage

    def events(self, piece: Piece) -> bytes:
        usage: UnsetType | None = None if self._include_usage else UNSET
        return self._event(piece, usage)

    def ending(self, usage: Usage) -> bytes:
        events = b""
        if self._include_usage:
            events = encode_event(_encoder.encode(Completion(self.id, self.created, self.model, (), usage)))
        return events + encode_event(DONE)

    def whole(self, piece: Piece, usage: Usage) -> bytes:
        return _encoder.encode(self._completion(piece, usage))

    def _event(self, piece: Piece, usage: Usage | UnsetType | None) -> bytes:
        event_id = piece.tokens[-1].position if piece.tokens else None
        return encode_event(_encoder.encode(self._completion(piece, usage)), event_id)

    def _completion(self, piece: Piece, usage: Usage | UnsetType | None) -> Completion:
        choice = CompletionChoice(piece.text, piece.finish_reason, self._logprobs(piece.tokens))
        return Completion(self.id, self.created, self.model, (choice,), usage)

    def _logprobs(self, tokens: tuple[CarriedToken, ...]) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        tokenizer = self.tokenizer
        shown = [token for token in tokens if token.is_shown and token.logprobs is not None]
        return CompletionLogprobs(
            tokens=tuple(tokenizer.token_text(token.token_id) for token in shown),
            token_logprobs=tuple(token.logprobs.logprob for token in shown if token.logprobs),
            top_logprobs=tuple(
                {tokenizer.token_text(token_id): logprob for token_id, logprob in token.logprobs.top}
                for token in shown
                if token.logprobs
            ),
            text_offset=tuple(token.text_offset for token in shown),
        )


class _ModelRoutes:
    def __init__(self, generator: Generator) -> None:
        self._models = generator.models

    async def all(self, request: Request) -> Response:
        listed = ModelList(tuple(self._model(config.name) for config in self._models.configs))
        return Response(_encoder.encode(listed), media_type="application/json")

    async def one(self, request: Request) -> Response:
        asked = request.path_params["id"]
        name = self._models.resolve(asked)
        if name is None:
            raise ApiError("model_not_found", f"this site has no model named {asked[:200]!r}", param="model")
        return Response(_encoder.encode(self._model(name)), media_type="application/json")

    def _model(self, name: str) -> Model:
        info = self._models.info(name)
        return Model(name, self._models.created, info.context_length if info is not None else UNSET)


def _token_logprob(token: CarriedToken, tokenizer: Tokenizer) -> TokenLogprob:
    chosen, top = (token.logprobs.logprob, token.logprobs.top) if token.logprobs is not None else (0.0, ())
    return TokenLogprob(
        tokenizer.token_text(token.token_id),
        chosen,
        tuple(tokenizer.token_bytes(token.token_id)),
        tuple(
            TopLogprob(tokenizer.token_text(token_id), logprob, tuple(tokenizer.token_bytes(token_id)))
            for token_id, logprob in top
        ),
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
