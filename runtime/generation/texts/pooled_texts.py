"""The texts of a request as a scope: permit, model, tokens, engine batches, and vectors in order.

Embeddings and scores share it. Independent of the use of a vector, HTTP and dialects.
"""

import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pilotlight.dialects.requests import TextRequest
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import Pooling, SamplingParams, Submit
from pilotlight.runtime.generation.generator import Generator, as_api_errors
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.support import background
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.chat import Usage
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse

# Texts of one request that are in the engine at a time: enough to fill its batches, and few enough to leave room in its queue for others.
WINDOW = 64

Vector = tuple[float, ...]


class EncodedText(NamedTuple):
    """A text, or a pair of texts that the model takes as one, as tokens."""

    token_ids: tuple[int, ...]
    second_from: int = 0  # start of the second text; 0 if there is one text, or the model does not distinguish them


class PooledTexts:
    """The result of a request; it has no vectors until `finish` is called.

    runtime/telemetry/metrics.py measures it like a generation."""

    def __init__(self, texts: list[EncodedText], pooling: Pooling) -> None:
        self.pooling = pooling
        self.vectors: list[Vector] = []
        self.usage = Usage.of(sum(len(text.token_ids) for text in texts), completion_tokens=0, cached_tokens=0)
        self.device_us = 0
        self.finish_reason: str | None = None
        self.delivered_tokens = 0

    @property
    def use(self) -> ResourceUse:
        return ResourceUse(self.usage.prompt_tokens, device_us=self.device_us)

    def finish(self, vectors: list[Vector]) -> None:
        self.vectors, self.finish_reason = vectors, "stop"


class TextPooler:
    """Computes vectors with the generator's parts: admission, models and engine sequences."""

    def __init__(self, generator: Generator) -> None:
        self.models = generator.models
        self._generator = generator

    async def pool(
        self,
        request: TextRequest,
        tenant: Tenant,
        encode: Callable[[AwakeModel], Awaitable[list[EncodedText]]],
        finish: Callable[[AwakeModel, list[Vector]], list[Vector]],
    ) -> PooledTexts:
        """Compute the vectors of a request's texts, and return them with its usage.

        `encode` returns the texts as tokens, or raises ApiError for an unsuitable model or text; `finish` converts their vectors."""
        site = self._generator
        with (
            as_api_errors(site.request_timeout_s),
            site.metrics.measure(request.model) as measure,
            site.admission.permit() as permit,
        ):
            async with TimeLimit(site.request_timeout_s), self.models.use(request.model) as model:
                texts = await encode(model)
                pooling = request.pooling or model.info.pooling
                assert pooling is not None, "a model that generates is refused before"
                permit.reserve(request.model, _most_at_once(texts), self.models.registry.kv_tokens(model))
                pooled = PooledTexts(texts, pooling)
                measure.answer = pooled
                vectors = await self._all([_submit(request.model, text, pooling, tenant) for text in texts], pooled)
                pooled.finish(finish(model, vectors))
                measure.note_delta(0)
                return pooled

    async def _all(self, submits: list[Submit], pooled: PooledTexts) -> list[Vector]:
        vectors: list[Vector] = [()] * len(submits)

        async def compute(number: int) -> None:
            vectors[number] = await self._one(submits[number], pooled)

        await background.run_all(range(len(submits)), compute, WINDOW)
        return vectors

    async def _one(self, submit: Submit, pooled: PooledTexts) -> Vector:
        async with self._generator.engine.generate(submit) as outputs:
            async for output in outputs:
                if output.finish_reason == "abort":
                    raise ApiError("aborted", "the request was aborted")
                pooled.device_us += output.device_us
                if output.embedding is not None:
                    return output.embedding
        raise EngineError("engine_error", "the engine ended a text without its vector")


def refuse_adapter(pooler: TextPooler, request: TextRequest) -> None:
    """Raise ApiError if the request names an adapter: adapters only change models that generate."""
    if pooler.models.adapters.named_in(request.requested_model, request.model) is not None:
        sentence = f"adapters support neither embeddings nor scores; use {request.model!r}"
        raise ApiError("invalid_request", sentence, param="model")


def check_tokens(model: AwakeModel, token_ids: tuple[int, ...], where: str, remedy: str) -> None:
    """Raise ApiError if the model cannot process these tokens.

    `where` is the client's name for the text; `remedy` is the advice for a text that is too long.
    """
    if not token_ids:
        raise ApiError("invalid_request", f"{where} has no tokens; send at least one", param=where)
    limit, vocab = model.info.context_length, model.info.vocab_size
    if len(token_ids) > limit:
        message = f"{where} has {len(token_ids)} tokens and {model.config.name!r} takes {limit}; {remedy}"
        raise ApiError("context_length_exceeded", message, param=where)
    if (largest := max(token_ids)) >= vocab:
        message = f"{where} has the token id {largest}, outside the vocabulary of {vocab} tokens"
        raise ApiError("invalid_request", message, param=where)


def _most_at_once(texts: list[EncodedText]) -> int:
    """Return the largest number of tokens that the request can have in the engine at once.

    Only these are reserved, so requests with thousands of texts do not cause refusals of others."""
    return sum(sorted(len(text.token_ids) for text in texts)[-WINDOW:])


def _submit(model: str, text: EncodedText, pooling: Pooling, tenant: Tenant) -> Submit:
    return Submit(
        os.urandom(16).hex(),
        model,
        text.token_ids,
        SamplingParams(max_tokens=1),
        tenant.salt,
        pooling=pooling,
        second_from=text.second_from,
    )
