"""OpenAI's paths: /ai/v1/chat/completions, /ai/v1/completions, /ai/v1/embeddings, /ai/v1/models, and the same under /v1.

Knows paths and models; how an answer is written is runtime/answers' business.
"""

from typing import Literal

import msgspec
from starlette.types import Receive, Scope, Send

from runtime.answers.chat import ChatAnswer
from runtime.answers.completion import CompletionAnswer
from runtime.connection import send_json
from runtime.generation import Generator
from runtime.routes.embeddings import EmbeddingEndpoint, as_openai
from runtime.routes.endpoint import Endpoint
from runtime.routing import Route, get, post
from runtime.validation import (
    ValidChat,
    ValidCompletion,
    ValidEmbedding,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from sites.site import LimitsConfig
from wire.chat import Model, ModelList
from wire.errors import ApiError, Dialect

_encoder = msgspec.json.Encoder()


def openai_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    resolve = generator.models.resolve

    def chat(raw: bytes, scope: Scope) -> ValidChat:
        return parse_chat(raw, resolve)

    def completion(raw: bytes, scope: Scope) -> ValidCompletion:
        return parse_completion(raw, resolve)

    def embedding(raw: bytes, scope: Scope) -> ValidEmbedding:
        return parse_embedding(raw, resolve)

    ends = {"max_body_mib": limits.max_body_mib, "heartbeat_s": limits.heartbeat_s}
    chats = Endpoint(generator, Dialect.OPENAI, chat, ChatAnswer, **ends)
    completions = Endpoint(generator, Dialect.OPENAI, completion, CompletionAnswer, **ends)
    embeddings = EmbeddingEndpoint(generator, embedding, as_openai, max_body_mib=limits.max_body_mib)
    models = _ModelRoutes(generator)
    return [
        route
        for prefix in ("/ai/v1", "/v1")
        for route in (
            post(f"{prefix}/chat/completions", chats),
            post(f"{prefix}/completions", completions),
            post(f"{prefix}/embeddings", embeddings),
            get(f"{prefix}/models", models.all),
            get(f"{prefix}/models/{{id:path}}", models.one),
        )
    ]


class _ModelRoutes:
    def __init__(self, generator: Generator) -> None:
        self._models = generator.models

    async def all(self, scope: Scope, receive: Receive, send: Send) -> None:
        listed = ModelList(tuple(self._model(config.name) for config in self._models.configs))
        await send_json(send, _encoder.encode(listed))

    async def one(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["path_params"]["id"]
        name = self._models.resolve(asked)
        if name is None:
            raise ApiError("model_not_found", f"this site has no model named {asked[:200]!r}", param="model")
        await send_json(send, _encoder.encode(self._model(name)))

    def _model(self, name: str) -> Model:
        info = self._models.info(name)
        if info is None:
            return Model(name, self._models.created)
        if info.pooling is None:
            kind: Literal["chat", "completion"] = "chat" if self._models.takes_conversations(name) else "completion"
            return Model(name, self._models.created, info.context_length, kind)
        return Model(name, self._models.created, info.context_length, "embedding", info.embedding_size)
