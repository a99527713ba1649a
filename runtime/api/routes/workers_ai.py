"""Cloudflare Workers AI's paths: .../ai/run/{model}, lists of models and tasks, token checks.

They generate as OpenAI's paths do, but the response is an object in an envelope, or a stream of `{"response": ...}` whose last event has the usage.
"""

import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.decisions.system_one import enveloped, parse_system_one
from pilotlight.dialects.openai_responses import parse_response
from pilotlight.dialects.workers_ai_api import (
    parse_run,
    parse_run_embedding,
    parse_run_reranker,
)
from pilotlight.runtime.api.builders.text_results import as_workers_ai_embeddings, as_workers_ai_ranking
from pilotlight.runtime.api.builders.workers_ai_run import RunBuilder, run_responses, task_of
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.router_context import body_limit, router_context
from pilotlight.runtime.api.routes.decisions import DecisionEndpoint
from pilotlight.runtime.api.routes.endpoint import Endpoint, parsed
from pilotlight.runtime.api.routes.model_catalog import ModelCatalog
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.admission import RETRY_AFTER_S
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.generation.texts.scoring import Scorer
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.credentials import bearer_token
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.asgi import header, read_body
from pilotlight.wire.workers_ai import (
    CLASSIFICATION_TASK,
    EMBEDDING_TASK,
    Envelope,
    Task,
    TokenState,
)

_encoder = msgspec.json.Encoder()
_PREFIX = "/client/v4/accounts/{account_id}/ai"
_REFUSED_OPTIONS = (b"queueRequest", b"queue_request")
_BUSY = re.compile(rb"(?:^|&)rejectIfBusy=(?:true|1)(?:&|$)")


def workers_ai_routes(generator: Generator, limits: LimitsConfig, is_busy: Callable[[str], bool]) -> list[Route]:
    """Return the routes. `is_busy` tells whether a request for a model would be queued or refused."""
    endpoints: dict[str, Endpoint[Any] | TextsEndpoint[Any] | DecisionEndpoint] = {
        "run": Endpoint(generator, Dialect.WORKERS_AI, parse_run, RunBuilder, limits),
        "response": Endpoint(generator, Dialect.WORKERS_AI, parse_response, run_responses, limits),
        "decision": DecisionEndpoint(generator, parse_system_one, enveloped, limits),
        "embedding": TextsEndpoint(
            generator, parse_run_embedding, Embedder(generator).embed, as_workers_ai_embeddings, limits
        ),
        "reranking": TextsEndpoint(
            generator, parse_run_reranker, Scorer(generator).score, as_workers_ai_ranking, limits
        ),
    }
    endpoint = _Run(endpoints, limits, is_busy)
    search = ModelCatalog(generator.models.registry)
    return [
        Route(f"{_PREFIX}/run/{{model:path}}", endpoint, methods=["POST"]),
        Route(f"{_PREFIX}/models/search", search.answer),
        Route(f"{_PREFIX}/models/schema", search.schema),
        Route(f"{_PREFIX}/tasks/search", _tasks),
        Route("/client/v4/user/tokens/verify", _token),
        Route("/fn/@{model:path}", _AsFunction(endpoint), methods=["POST"]),
    ]


class _AsFunction:
    """A model as a function: POST /fn/@org/model with its inputs.

    For clients that call functions; they all count as one account."""

    def __init__(self, endpoint: "_Run") -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = {"account_id": "functions", "model": f"@{scope['path_params']['model']}"}
        await self._endpoint({**scope, "path_params": named}, receive, send)


class _Run:
    """Run a model of any task; the body determines the task."""

    def __init__(
        self,
        endpoints: dict[str, Endpoint[Any] | TextsEndpoint[Any] | DecisionEndpoint],
        limits: LimitsConfig,
        is_busy: Callable[[str], bool],
    ) -> None:
        self._is_busy = is_busy
        self._endpoints = endpoints
        self._max_body_bytes = limits.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(option in scope["query_string"] for option in _REFUSED_OPTIONS):
            message = "queueRequest needs a router with a ledger; a site cannot queue requests for later"
            raise ApiError("unsupported_parameter", message, param="queueRequest")
        if _BUSY.search(scope["query_string"]) and self._is_busy(scope["path_params"]["model"]):
            message = "the model has no free capacity, and the request asked not to wait"
            raise ApiError("overloaded", message, retry_after_s=RETRY_AFTER_S)
        raw = await read_body(scope, receive, body_limit(scope, self._max_body_bytes))
        _, asked = router_context(scope, raw)
        await self._endpoints[await parsed(task_of, asked)].answer(
            raw, scope, receive, send, scope["path_params"]["model"]
        )


async def _tasks(request: Request) -> Response:
    return json_response(_encoder.encode(Envelope((Task(), EMBEDDING_TASK, CLASSIFICATION_TASK))))


async def _token(request: Request) -> Response:
    """Confirm that the request's key is valid; the middleware has refused requests with invalid keys."""
    key = bearer_token(header(request.scope, "authorization"))
    if not key:
        raise ApiError("unauthorized", "send the key to be verified as `Authorization: Bearer KEY`")
    return json_response(_encoder.encode(Envelope(TokenState(sha256(key.encode()).hexdigest()[:32]))))
