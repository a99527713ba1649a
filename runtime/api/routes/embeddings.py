"""Embeddings: OpenAI's /ai/v1/embeddings, and Workers AI's `{"text": ...}` at /ai/run."""

from typing import TYPE_CHECKING

import msgspec

from pilotlight.dialects.requests import ValidEmbedding
from pilotlight.wire.embeddings import Embedding, EmbeddingList, EmbeddingUsage, as_base64
from pilotlight.wire.workers_ai import EmbeddingResult, Envelope

if TYPE_CHECKING:
    from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts

_encoder = msgspec.json.Encoder()


def as_openai(request: ValidEmbedding, pooled: "PooledTexts") -> bytes:
    data = tuple(
        Embedding(i, as_base64(vector) if request.as_base64 else vector) for i, vector in enumerate(pooled.vectors)
    )
    usage = EmbeddingUsage(pooled.usage.prompt_tokens, pooled.usage.total_tokens)
    return _encoder.encode(EmbeddingList(data, request.requested_model, usage))


def as_workers_ai(request: ValidEmbedding, pooled: "PooledTexts") -> bytes:
    vectors = tuple(pooled.vectors)
    return _encoder.encode(Envelope(EmbeddingResult((len(vectors), len(vectors[0])), vectors, pooled.pooling)))
