"""OpenAI's paths: chat completions, completions, embeddings and models.

They are served under /ai/v1, /v1, and an account's path of Cloudflare's API. runtime/api/builders writes the answers.
"""

from typing import Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.dialects.anthropic import VERSION_HEADER, model_card, model_page
from pilotlight.dialects.embeddings_api import parse_embedding
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_completions import parse_completion
from pilotlight.runtime.api.builders.openai_events import ChatBuilder, CompletionBuilder
from pilotlight.runtime.api.builders.text_results import as_embeddings
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.router_context import may_see, tenant_in
from pilotlight.runtime.api.routes.endpoint import PREFIXES, Endpoint
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.models.adapters import SEPARATOR
from pilotlight.runtime.models.model_state import no_model
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.chat import ListedModel, ModelList
from pilotlight.wire.errors import Dialect
from pilotlight.wire.http.asgi import header

_encoder = msgspec.json.Encoder()


def openai_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    chats = Endpoint(generator, Dialect.OPENAI, parse_chat, ChatBuilder, limits)
    completions = Endpoint(generator, Dialect.OPENAI, parse_completion, CompletionBuilder, limits)
    embeddings = TextsEndpoint(generator, parse_embedding, Embedder(generator).embed, as_embeddings, limits)
    models = _ModelRoutes(generator)
    return [
        route
        for prefix in PREFIXES
        for route in (
            Route(f"{prefix}/chat/completions", chats, methods=["POST"]),
            Route(f"{prefix}/completions", completions, methods=["POST"]),
            Route(f"{prefix}/embeddings", embeddings, methods=["POST"]),
            Route(f"{prefix}/models", models.all),
            Route(f"{prefix}/models/{{id:path}}", models.one),
        )
    ]


class _ModelRoutes:
    def __init__(self, generator: Generator) -> None:
        self._models = generator.models.registry
        self._adapters = generator.models.adapters

    async def all(self, request: Request) -> Response:
        if header(request.scope, VERSION_HEADER) is not None:
            names = [config.name for config in self._models.configs if self._is_seen(request, config.name)]
            cards = [model_card(name, self._models.created) for name in names]
            return json_response(_encoder.encode(model_page(cards)))
        owner = tenant_in(request.scope).owner
        models = [self._model(config.name) for config in self._models.configs]
        adapted = [_adapted(model, name) for model in models for name in self._adapters.names(model.id, owner)]
        listed = ModelList(tuple(model for model in (*models, *adapted) if self._is_seen(request, model.id)))
        return json_response(_encoder.encode(listed))

    async def one(self, request: Request) -> Response:
        asked = request.path_params["id"]
        name = self._models.resolve(asked)
        adapter = None if name is None else self._adapters.named_in(asked, name)
        owner = tenant_in(request.scope).owner
        is_there = name is not None and (adapter is None or self._adapters.has(name, adapter, owner))
        if name is None or not is_there or not self._is_seen(request, asked):
            raise no_model(asked)
        if header(request.scope, VERSION_HEADER) is not None:
            return json_response(_encoder.encode(model_card(name, self._models.created)))
        listed = self._model(name)
        return json_response(_encoder.encode(listed if adapter is None else _adapted(listed, adapter)))

    def _is_seen(self, request: Request, name: str) -> bool:
        return may_see(request.scope, self._models.names_of(name))

    def _model(self, name: str) -> ListedModel:
        info = self._models.info(name)
        if info is None:
            return ListedModel(name, self._models.created)
        kind: Literal["chat", "completion", "embedding", "rerank", "classification"] = "embedding"
        if info.labels:
            kind = "rerank" if len(info.labels) == 1 else "classification"
        elif info.pooling is None:
            kind = "chat" if self._models.takes_conversations(name) else "completion"
        return ListedModel(
            name,
            self._models.created,
            context_length=info.context_length,
            max_model_len=info.context_length,
            kv_cache_tokens=info.total_blocks * info.block_size,
            dtype=info.dtype,
            stored_dtypes=info.stored_dtypes or UNSET,
            weights_bytes=info.weights_bytes,
            saved_bytes=info.saved_bytes or UNSET,
            type=kind,
            embedding_size=info.embedding_size if kind == "embedding" else UNSET,
            labels=info.labels if kind == "classification" else UNSET,
            input_modalities=("text",) if info.image_token_id is None else ("text", "image"),
        )


def _adapted(model: ListedModel, adapter: str) -> ListedModel:
    """Return the entry of a model's adapter in the list of models, made from the model's entry."""
    return replace(model, id=f"{model.id}{SEPARATOR}{adapter}", root=adapter, parent=model.id)
