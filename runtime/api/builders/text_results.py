"""Render the vectors and scores of texts.

They are OpenAI's embeddings, rankings, scores and classes, and the results of Workers AI's `run`."""

import os
import time
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from pilotlight.dialects.requests import ValidEmbedding, ValidScoring
from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts
from pilotlight.wire.embeddings import Embedding, EmbeddingList, EmbeddingUsage, as_base64
from pilotlight.wire.scoring import (
    ApiVersion,
    ClassList,
    PairScore,
    RankedDocument,
    RankedText,
    RerankMeta,
    RerankResult,
    ScoredPosition,
    ScoreList,
    ScoringUsage,
    TextClasses,
)
from pilotlight.wire.workers_ai import EmbeddingResult, Envelope, RankedContext, RerankerResult

_encoder = msgspec.json.Encoder()


def as_embeddings(request: ValidEmbedding, pooled: PooledTexts) -> bytes:
    data = tuple(
        Embedding(i, as_base64(vector) if request.as_base64 else vector) for i, vector in enumerate(pooled.vectors)
    )
    usage = EmbeddingUsage(pooled.usage.prompt_tokens, pooled.usage.total_tokens)
    return _encoder.encode(EmbeddingList(data, request.requested_model, usage))


def as_workers_ai_embeddings(request: ValidEmbedding, pooled: PooledTexts) -> bytes:
    vectors = tuple(pooled.vectors)
    return _encoder.encode(Envelope(EmbeddingResult((len(vectors), len(vectors[0])), vectors, pooled.pooling)))


def ranked(request: ValidScoring, pooled: PooledTexts) -> list[tuple[int, float]]:
    """Return the requested number of documents as (index, score), the best first."""
    scores = sorted(enumerate([score for (score,) in pooled.vectors]), key=lambda item: -item[1])
    return scores[: request.top_n]


def as_ranking(request: ValidScoring, pooled: PooledTexts, version: str) -> bytes:
    def text(index: int) -> str:
        return request.texts[index].second or ""

    best = ranked(request, pooled)
    if request.is_bare:
        return _encoder.encode(
            [ScoredPosition(index, score, text(index) if request.returns_texts else UNSET) for index, score in best]
        )
    results = [
        RankedDocument(index, score, RankedText(text(index)) if request.returns_texts else UNSET)
        for index, score in best
    ]
    meta = RerankMeta(ApiVersion(version), {"input_tokens": pooled.usage.prompt_tokens})
    name = f"rerank-{os.urandom(16).hex()}"
    return _encoder.encode(RerankResult(name, request.requested_model, tuple(results), _usage(pooled), meta))


def as_scores(request: ValidScoring, pooled: PooledTexts) -> bytes:
    scores = tuple([PairScore(i, score) for i, (score,) in enumerate(pooled.vectors)])
    name = f"score-{os.urandom(16).hex()}"
    return _encoder.encode(ScoreList(name, int(time.time()), request.requested_model, scores, _usage(pooled)))


def as_classes(labels_of: Callable[[str], tuple[str, ...]], request: ValidScoring, pooled: PooledTexts) -> bytes:
    labels = labels_of(request.model)
    found = [
        TextClasses(i, labels[max(range(len(probs)), key=probs.__getitem__)], probs, len(probs))
        for i, probs in enumerate(pooled.vectors)
    ]
    name = f"classify-{os.urandom(16).hex()}"
    return _encoder.encode(ClassList(name, int(time.time()), request.requested_model, tuple(found), _usage(pooled)))


def as_workers_ai_ranking(request: ValidScoring, pooled: PooledTexts) -> bytes:
    best = tuple([RankedContext(index, score) for index, score in ranked(request, pooled)])
    return _encoder.encode(Envelope(RerankerResult(best)))


def _usage(pooled: PooledTexts) -> ScoringUsage:
    return ScoringUsage(pooled.usage.prompt_tokens, pooled.usage.total_tokens)
