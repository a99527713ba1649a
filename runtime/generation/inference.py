"""Models of a site for the calls of its functions, without HTTP.

Validation, tenants, limits and errors are those of Workers AI's own path. SiteInference implements functions/inference.py with the site's generator.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from pilotlight.dialects.openai_responses import parse_response
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.dialects.workers_ai_api import ValidRun, parse_run, parse_run_embedding, parse_run_reranker
from pilotlight.functions.inference import InferenceResponse
from pilotlight.runtime.api.builders.text_results import as_workers_ai_embeddings, as_workers_ai_ranking
from pilotlight.runtime.api.builders.workers_ai_run import RunBuilder, run_responses, task_of
from pilotlight.runtime.api.connection import EventWriter, error_body
from pilotlight.runtime.api.routes.endpoint import ResponseBuilder, events_of, parsed
from pilotlight.runtime.api.routes.model_catalog import ModelCatalog
from pilotlight.runtime.generation.texts.embedding import Embedder
from pilotlight.runtime.generation.texts.scoring import Scorer
from pilotlight.runtime.site import Site
from pilotlight.support import background
from pilotlight.wire.credentials import Tenant, owner_of, tenant_of
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.http.asgi import too_large
from pilotlight.wire.sse import CONTENT_TYPE, HEARTBEAT, encode_event

EVENTS_WAITING = 16  # limit of a stream's deltas that its reader has not taken yet
JSON_HEADERS = ("content-type", "application/json")
STREAM_HEADERS = (("content-type", CONTENT_TYPE), *EventWriter.HEADERS)

log = logging.getLogger("pilotlight.http")


class SiteInference:
    def __init__(self, site: Site) -> None:
        self._generator = site.generator
        self._embedder = Embedder(site.generator)
        self._scorer = Scorer(site.generator)
        self._catalog = ModelCatalog(site.generator.models.registry)
        self._max_bytes = site.config.limits.max_body_bytes
        self._heartbeat_s = site.config.limits.heartbeat_s
        self.is_busy = site.is_busy

    def models(self, search: str) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(self._catalog.cards(search)))
        return cards

    def serves(self, model: str) -> bool:
        return self._generator.models.registry.resolve(model) is not None

    def own_names(self, model: str) -> tuple[str, str]:
        registry = self._generator.models.registry
        return registry.resolve(model) or model, registry.adapter_in(model)

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        try:
            return await self._run(account, model, inputs, headers)
        except Exception as error:
            refusal = _as_api_error(error, model)
            pairs = [JSON_HEADERS, *refusal.headers()]
            return InferenceResponse(refusal.status(Dialect.WORKERS_AI), pairs, error_body(refusal, Dialect.WORKERS_AI))

    async def _run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        if len(inputs) > self._max_bytes:
            raise too_large(self._max_bytes)
        resolve = self._generator.models.registry.resolve
        task = await parsed(task_of, inputs)
        tenant = tenant_of(owner_of(headers.get("authorization"), ""), account)
        if task == "embedding":
            texts = await parsed(parse_run_embedding, inputs, resolve, model)
            embeddings = await self._embedder.embed(texts, tenant)
            return _result(as_workers_ai_embeddings(texts, embeddings), embeddings.use)
        if task == "reranking":
            pairs = await parsed(parse_run_reranker, inputs, resolve, model)
            scores = await self._scorer.score(pairs, tenant)
            return _result(as_workers_ai_ranking(pairs, scores), scores.use)
        request: ValidGeneration
        if task == "response":
            request = await parsed(parse_response, inputs, resolve, model)
        else:
            request = await parsed(parse_run, inputs, resolve, model)
        request = replace(request, num_bytes=len(inputs))
        builder = self._builder(request)
        if request.stream:
            stream = GeneratedEvents(request.model, self._heartbeat_s)
            stream.start(self._events(request, tenant, builder, stream))
            await stream.begin()
            return InferenceResponse(200, [*STREAM_HEADERS], events=stream)
        async with self._generator.generate(request, tenant) as generation:
            deltas = await generation.whole()
        return _result(builder.whole(deltas, generation), generation.counter.resource_use())

    def _builder(self, request: ValidGeneration) -> ResponseBuilder:
        if isinstance(request, ValidRun):
            return RunBuilder(request, self._generator)
        return run_responses(request, self._generator)

    async def _events(
        self, request: ValidGeneration, tenant: Tenant, builder: ResponseBuilder, stream: "GeneratedEvents"
    ) -> AsyncGenerator[bytes, None]:
        async with self._generator.generate(request, tenant) as generation:
            async for delta in generation.deltas():
                stream.use = generation.counter.resource_use()
                yield events_of(delta, generation, builder)


class GeneratedEvents:
    """The events of a generation that runs in a separate task.

    A timeout applies to a task, but the events may be read by several tasks in turn.
    """

    def __init__(self, model: str, heartbeat_s: float) -> None:
        self.use = ResourceUse()  # use of all outputs so far, including those not taken yet
        self._model = model
        self._heartbeat_s = heartbeat_s
        self._waiting: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue(EVENTS_WAITING)
        self._first: bytes | None = None
        self._has_started = self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    def start(self, events: AsyncGenerator[bytes, None]) -> None:
        self._task = asyncio.create_task(self._run(events), name="inference")

    async def begin(self) -> None:
        """Wait until the first output can be read.

        Raises ApiError if the request is refused; the stream is closed then."""
        try:
            self._first = await self._next()
            self._has_started = True
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> "GeneratedEvents":
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        chunk = await self._next() if first is None else first
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        self._has_ended = True
        assert self._task is not None
        await background.stop(self._task)

    async def _next(self) -> bytes | None:
        """Return the next events, a heartbeat after a silence, or None at the end.
        Raises ApiError for a refusal."""
        if self._has_ended:
            return None
        try:
            async with asyncio.timeout(self._heartbeat_s):
                found = await self._waiting.get()
        except TimeoutError:
            return HEARTBEAT
        self._has_ended = not isinstance(found, bytes)
        if not isinstance(found, ApiError):
            return found
        if self._has_started:
            return encode_event(error_body(found, Dialect.WORKERS_AI))
        raise found

    async def _run(self, events: AsyncGenerator[bytes, None]) -> None:
        refusal: ApiError | None = None
        try:
            async with aclosing(events):
                async for chunk in events:
                    await self._waiting.put(chunk)
        except Exception as error:
            refusal = _as_api_error(error, self._model)
        await self._waiting.put(refusal)


def _as_api_error(error: Exception, model: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a function's call of %s failed", model, exc_info=error)
    return ApiError("internal_error", "internal error at this site; see its log")


class _Envelope(msgspec.Struct):
    result: msgspec.Raw


def _result(envelope: bytes, use: ResourceUse) -> InferenceResponse:
    body = bytes(msgspec.json.decode(envelope, type=_Envelope).result)
    return InferenceResponse(200, [JSON_HEADERS], body, use=use)
