"""Embeddings in both dialects: OpenAI's /ai/v1/embeddings and Workers AI's `{"text": ...}` at /ai/run."""

from collections.abc import Callable

import msgspec

from pilotlight.dialects.requests import ValidEmbedding
from pilotlight.runtime.api.routes.texts import Render, TextsEndpoint
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.embeddings import Embedding, EmbeddingList, EmbeddingUsage, as_base64
from pilotlight.wire.workers_ai import EmbeddingResult, Envelope

_encoder = msgspec.json.Encoder()


def embedding_endpoint(
    generator: Generator,
    parse: Callable[..., ValidEmbedding],
    render: Render[ValidEmbedding],
    limits: LimitsConfig,
) -> TextsEndpoint[ValidEmbedding]:
    return TextsEndpoint(generator, parse, Embedder(generator).embed, render, limits)


def as_openai(request: ValidEmbedding, pooled: PooledTexts) -> bytes:
    data = tuple(
        Embedding(i, as_base64(vector) if request.as_base64 else vector) for i, vector in enumerate(pooled.vectors)
    )
    usage = EmbeddingUsage(pooled.usage.prompt_tokens, pooled.usage.total_tokens)
    return _encoder.encode(EmbeddingList(data, request.requested_model, usage))


def as_workers_ai(request: ValidEmbedding, pooled: PooledTexts) -> bytes:
    vectors = tuple(pooled.vectors)
    return _encoder.encode(Envelope(EmbeddingResult((len(vectors), len(vectors[0])), vectors, pooled.pooling)))
