"""The site's models in Workers AI's form: searches and schemas."""

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from pilotlight.dialects.body.json_schemas import schema_of
from pilotlight.dialects.workers_ai_api import RunBody, RunEmbeddingBody, RunRerankerBody
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.router_context import may_see
from pilotlight.runtime.models.model_state import no_model
from pilotlight.runtime.models.model_view import ModelRegistry
from pilotlight.wire.workers_ai import (
    CLASSIFICATION_TASK,
    EMBEDDING_TASK,
    EmbeddingResult,
    Envelope,
    ModelCard,
    Property,
    RerankerResult,
    TextResult,
    page_of,
)

_encoder = msgspec.json.Encoder()


class ModelCatalog:
    """The site's models as cards, in pages.

    `?search=` selects names that contain it, `?task=` a task by its name or id."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def answer(self, request: Request) -> Response:
        query = request.query_params
        task = query.get("task", "").lower()
        cards = [
            card
            for card in self.cards(query.get("search", ""))
            if task in ("", card.task.name.lower(), card.task.id)
            and may_see(request.scope, self._models.names_of(card.id))
        ]
        shown, info = page_of(cards, query)
        return json_response(_encoder.encode(Envelope(tuple(shown), result_info=info)))

    async def schema(self, request: Request) -> Response:
        """The JSON Schemas of a model's input and result; `?model=` names it."""
        asked = request.query_params.get("model", "")
        name = self._models.resolve(asked)
        if name is None or not may_see(request.scope, self._models.names_of(asked)):
            raise no_model(asked)
        info = self._models.info(name)
        inputs: type[Struct]
        result: type[Struct]
        inputs, result = (RunEmbeddingBody, EmbeddingResult) if info and info.pooling else (RunBody, TextResult)
        if info and info.labels:
            inputs, result = RunRerankerBody, RerankerResult
        schemas = {"input": schema_of(inputs), "output": schema_of(result)}
        return json_response(_encoder.encode(Envelope(schemas)))

    def cards(self, search: str) -> list[ModelCard]:
        """Return the cards of the models with `search` in their name or in an alias."""
        wanted = search.lower()
        return [
            self._card(config.name)
            for config in self._models.configs
            if any(wanted in name.lower() for name in (config.name, *config.aliases))
        ]

    def _card(self, name: str) -> ModelCard:
        info = self._models.info(name)
        description = f"{name}, served by this site"
        if info is None:
            return ModelCard(name, name, description)
        if info.pooling is None:
            return ModelCard(name, name, description, (Property("context_window", str(info.context_length)),))
        longest = Property("max_input_tokens", str(info.context_length))
        if info.labels:
            return ModelCard(name, name, description, (longest,), CLASSIFICATION_TASK)
        properties = (
            longest,
            Property("output_dimensions", str(info.embedding_size)),
        )
        return ModelCard(name, name, description, properties, EMBEDDING_TASK)
