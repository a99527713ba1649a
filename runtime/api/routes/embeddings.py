"""Embeddings in both dialects: OpenAI's /ai/v1/embeddings and Workers AI's `{"text": ...}` at /ai/run. Never a stream."""

from collections.abc import Callable
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.requests import ValidEmbedding
from pilotlight.runtime.api.connection import read_body, send_json, until_disconnect
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.router_context import check_model, tenant_in
from pilotlight.runtime.api.routes.endpoint import MIB, counting, naming_ignored, parsed
from pilotlight.runtime.generation.embedding import Embedder, Embeddings
from pilotlight.runtime.generation.generator import Generator
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.embeddings import Embedding, EmbeddingList, EmbeddingUsage, as_base64
from pilotlight.wire.workers_ai import EmbeddingResult, Envelope

_encoder = msgspec.json.Encoder()

Parse = Callable[..., ValidEmbedding]
Render = Callable[[ValidEmbedding, Embeddings], bytes]


class EmbeddingEndpoint:
    """A pure ASGI application for one path."""

    def __init__(self, generator: Generator, parse: Parse, render: Render, limits: LimitsConfig) -> None:
        self._embedder = Embedder(generator)
        self._resolve = generator.models.registry.resolve
        self._parse = partial(parse, strict=limits.strict_fields)
        self._render = render
        self._max_body_bytes = int(limits.max_body_mib * MIB)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(await read_body(scope, receive, self._max_body_bytes), scope, receive, send)

    async def answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send, *model: str) -> None:
        """Answer a request whose body has been read."""
        request = await parsed(self._parse, raw, self._resolve, *model)
        check_model(scope, request.requested_model)
        tenant = tenant_in(scope)

        async def respond() -> None:
            embeddings = await self._embedder.embed(request, tenant)
            headers = naming_ignored(request) + (counting(embeddings.use) if scope.get(GENUINE_HOP, False) else [])
            await send_json(send, self._render(request, embeddings), headers=headers)

        await until_disconnect(receive, respond())


def as_openai(request: ValidEmbedding, embeddings: Embeddings) -> bytes:
    data = tuple(
        Embedding(i, as_base64(vector) if request.as_base64 else vector) for i, vector in enumerate(embeddings.vectors)
    )
    usage = EmbeddingUsage(embeddings.usage.prompt_tokens, embeddings.usage.total_tokens)
    return _encoder.encode(EmbeddingList(data, request.requested_model, usage))


def as_workers_ai(request: ValidEmbedding, embeddings: Embeddings) -> bytes:
    vectors = tuple(embeddings.vectors)
    return _encoder.encode(Envelope(EmbeddingResult((len(vectors), len(vectors[0])), vectors, embeddings.pooling)))
