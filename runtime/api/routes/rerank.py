"""Scores: /v1/rerank, /rerank, /v2/rerank, /v1/score, /v1/classify, and `run` with contexts.

The forms are those of Jina, Cohere, text-embeddings-inference, vLLM, and Workers AI (`{"query": ..., "contexts": [...]}`).
"""

import os
import time
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.routing import Route

from pilotlight.dialects.requests import ValidScoring
from pilotlight.dialects.scoring_api import parse_classify, parse_rerank, parse_rerank_v2, parse_score
from pilotlight.runtime.api.routes.endpoint import PREFIXES
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts
from pilotlight.runtime.generation.texts.scoring import Scorer
from pilotlight.sites.site import LimitsConfig
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
from pilotlight.wire.workers_ai import Envelope, RankedContext, RerankerResult

_encoder = msgspec.json.Encoder()


def scoring_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    scorer = Scorer(generator)

    def endpoint(
        parse: Callable[..., ValidScoring], render: Callable[[ValidScoring, PooledTexts], bytes]
    ) -> TextsEndpoint[ValidScoring]:
        return TextsEndpoint(generator, parse, scorer.score, render, limits)

    endpoints = {
        "rerank": endpoint(parse_rerank, partial(as_ranking, version="1")),
        "score": endpoint(parse_score, as_scores),
        "classify": endpoint(parse_classify, partial(as_classes, scorer)),
    }
    second = endpoint(parse_rerank_v2, partial(as_ranking, version="2"))
    return [
        Route("/v2/rerank", second, methods=["POST"]),
        *(
            Route(f"{prefix}/{name}", app, methods=["POST"])
            for prefix in (*PREFIXES, "")
            for name, app in endpoints.items()
        ),
    ]


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


def as_classes(scorer: Scorer, request: ValidScoring, pooled: PooledTexts) -> bytes:
    labels = scorer.labels(request.model)
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
