"""Cloudflare Workers AI's paths: .../ai/run/{model}, lists of models, tasks and schemas, token checks.

They generate as OpenAI's paths do, but the response is an object in an envelope, or a stream of `{"response": ...}` whose last event has the usage.
If JSON was requested, `response` is an object; in a stream, or if the answer was cut short, it is text.
"""

import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Literal

import msgspec
import orjson
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.body.json_schemas import schema_of
from pilotlight.dialects.decisions.system_one import enveloped, parse_system_one
from pilotlight.dialects.openai_responses import ResponsesWriter, parse_response
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.dialects.workers_ai_api import (
    RunBody,
    RunEmbeddingBody,
    RunRerankerBody,
    ValidRun,
    parse_run,
    parse_run_embedding,
    parse_run_reranker,
)
from pilotlight.engine.text.formats import CallPart, ReasoningPart, TextPart
from pilotlight.runtime.api.builders.blocks import BlockBuilder
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.router_context import body_limit, may_see, router_context
from pilotlight.runtime.api.routes.decisions import DecisionEndpoint
from pilotlight.runtime.api.routes.embeddings import as_workers_ai
from pilotlight.runtime.api.routes.endpoint import MIB, Endpoint, parsed
from pilotlight.runtime.api.routes.rerank import as_workers_ai_ranking
from pilotlight.runtime.api.routes.texts import TextsEndpoint
from pilotlight.runtime.generation.admission import RETRY_AFTER_S
from pilotlight.runtime.generation.generator import Generation, Generator
from pilotlight.runtime.generation.output_processor import Delta
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.generation.texts.scoring import Scorer
from pilotlight.sites.site import LimitsConfig
from pilotlight.wire.chat import FinishReason, Usage
from pilotlight.wire.credentials import bearer_token
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.asgi import header, read_body
from pilotlight.wire.sse import DONE, encode_event
from pilotlight.wire.workers_ai import (
    CLASSIFICATION_TASK,
    EMBEDDING_TASK,
    Call,
    EmbeddingResult,
    Envelope,
    ModelCard,
    Property,
    RerankerResult,
    Task,
    TextResult,
    TokenState,
    page_of,
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
        "embedding": TextsEndpoint(generator, parse_run_embedding, Embedder(generator).embed, as_workers_ai, limits),
        "reranking": TextsEndpoint(
            generator, parse_run_reranker, Scorer(generator).score, as_workers_ai_ranking, limits
        ),
    }
    endpoint = _Run(endpoints, limits, is_busy)
    search = ModelCatalog(generator)
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
        self._max_body_bytes = int(limits.max_body_mib * MIB)

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


def task_of(raw: bytes) -> Literal["run", "response", "embedding", "reranking", "decision"]:
    """Return the kind of a request's body: generation, Responses body, embeddings, scores or decisions.

    Most bodies have none of the distinguishing words, so they are not decoded here. Invalid JSON is refused later.
    """
    if not any(word in raw for word in (b'"text"', b'"input"', b'"contexts"', b'"questions"')):
        return "run"
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "run"
    if not isinstance(values, dict) or values.get("messages") is not None or values.get("prompt") is not None:
        return "run"
    if values.get("contexts") is not None:
        return "reranking"
    if values.get("questions") is not None:
        return "decision"
    if values.get("input") is not None:
        return "response"
    return "embedding" if values.get("text") is not None else "run"


class RunResponsesWriter(ResponsesWriter):
    """Writer of a Responses object in the envelope of `run`, with all of its text in one field."""

    def _response(self, status: str, usage: Usage | None, finish_reason: FinishReason | None) -> dict[str, Any]:
        text = "".join(block.text for block in self.blocks if block.kind == "text")
        return {**super()._response(status, usage, finish_reason), "output_text": text}

    def whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        response = msgspec.Raw(super().whole(usage, finish_reason, stop_string))
        return _encoder.encode(Envelope(response))


def run_responses(request: ValidGeneration, generator: Generator) -> BlockBuilder:
    return BlockBuilder(RunResponsesWriter, request, generator)


class RunBuilder:
    num_events = 0

    def __init__(self, request: ValidRun, generator: Generator) -> None:
        self._is_document = request.constraint is not None and request.constraint.kind == "json_schema"

    def events(self, delta: Delta, generation: Generation) -> bytes:
        return b"".join(encode_event(_encoder.encode(result)) for result in _results(delta))

    def ending(self, generation: Generation) -> bytes:
        last = TextResult("", usage=generation.usage, finish_reason=generation.finish_reason or UNSET)
        return encode_event(_encoder.encode(last)) + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        (delta,) = deltas
        calls = tuple(_call(call, arguments) for call, arguments in delta.calls)
        result = TextResult(
            delta.text, calls or UNSET, generation.usage, delta.reasoning or UNSET, delta.finish_reason or UNSET
        )
        if not self._is_document or calls or not _is_json(delta.text):
            return _encoder.encode(Envelope(result))
        return _encoder.encode(Envelope({**msgspec.to_builtins(result), "response": msgspec.Raw(delta.text.encode())}))


class ModelCatalog:
    """The site's models as cards, in pages.

    `?search=` selects names that contain it, `?task=` a task by its name or id."""

    def __init__(self, generator: Generator) -> None:
        self._models = generator.models.registry

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
            raise ApiError("model_not_found", f"this site has no model named {asked[:200]!r}", param="model")
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


async def _tasks(request: Request) -> Response:
    return json_response(_encoder.encode(Envelope((Task(), EMBEDDING_TASK, CLASSIFICATION_TASK))))


async def _token(request: Request) -> Response:
    """Confirm that the request's key is valid; the middleware has refused requests with invalid keys."""
    key = bearer_token(header(request.scope, "authorization"))
    if not key:
        raise ApiError("unauthorized", "send the key to be verified as `Authorization: Bearer KEY`")
    return json_response(_encoder.encode(Envelope(TokenState(sha256(key.encode()).hexdigest()[:32]))))


def _results(delta: Delta) -> Iterator[TextResult]:
    """Yield an event for each part of a delta; a tool call is a single event."""
    calls = iter(delta.calls)
    for part in delta.parts:
        if isinstance(part, TextPart):
            yield TextResult(part.text)
        elif isinstance(part, ReasoningPart):
            yield TextResult("", reasoning_content=part.text)
        elif isinstance(part, CallPart):
            yield TextResult("", (_call(*next(calls)),))


def _call(call: CallPart, arguments: str) -> Call:
    """Return a call with its arguments as JSON, or as a JSON string if they are not valid JSON."""
    if not _is_json(arguments):
        arguments = msgspec.json.encode(arguments).decode()
    # An event has one line. A line end in JSON can only be white space.
    return Call(call.name, msgspec.Raw(arguments.replace("\r", " ").replace("\n", " ").encode()))


def _is_json(text: str) -> bool:
    """Tell whether a text is one JSON document. Numbers that exceed a float are accepted."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except ValueError:
        return False
    return True
