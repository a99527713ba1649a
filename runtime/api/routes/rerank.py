"""Scores: /v1/rerank, /rerank, /v2/rerank, /v1/score, /v1/classify, and `run` with contexts.

The forms are those of Jina, Cohere, text-embeddings-inference, vLLM, and Workers AI (`{"query": ..., "contexts": [...]}`).
"""

from collections.abc import Callable
from functools import partial

from starlette.routing import Route

from pilotlight.dialects.requests import ValidScoring
from pilotlight.dialects.scoring_api import parse_classify, parse_rerank, parse_rerank_v2, parse_score
from pilotlight.runtime.api.builders.text_results import as_classes, as_ranking, as_scores
from pilotlight.runtime.api.routes.endpoint import PREFIXES
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.pooled_texts import PooledTexts
from pilotlight.runtime.generation.texts.scoring import Scorer
from pilotlight.sites.site import LimitsConfig


def scoring_routes(generator: Generator, limits: LimitsConfig) -> list[Route]:
    scorer = Scorer(generator)

    def endpoint(
        parse: Callable[..., ValidScoring], render: Callable[[ValidScoring, PooledTexts], bytes]
    ) -> TextsEndpoint[ValidScoring]:
        return TextsEndpoint(generator, parse, scorer.score, render, limits)

    endpoints = {
        "rerank": endpoint(parse_rerank, partial(as_ranking, version="1")),
        "score": endpoint(parse_score, as_scores),
        "classify": endpoint(parse_classify, partial(as_classes, scorer.labels)),
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
