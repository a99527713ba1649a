"""One request for embeddings as a scope: permit, model, tokens, a few texts at a time through the engine, vectors in the order of the texts.

Knows what `dimensions` does to a vector; refuses to know HTTP and dialects.
"""

import asyncio
import math
import os
from collections.abc import Iterator

from pilotlight.dialects.requests import EmbeddingInput, ValidEmbedding
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import Pooling, SamplingParams, Submit
from pilotlight.engine.text.tokenizer import INLINE_CHARACTERS
from pilotlight.runtime.generation.generator import Generator, as_api_errors
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.wire.chat import Usage
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse

# Texts of one request that the engine has at a time: enough to fill its batches, few enough to leave room for others in its queue.
WINDOW = 64

Vector = tuple[float, ...]


class Embeddings:
    """An answer in the making, and then made. Its clock is watched as a generation's is (runtime/telemetry/metrics.py)."""

    def __init__(self, prompts: list[tuple[int, ...]], pooling: Pooling) -> None:
        self.pooling = pooling
        self.vectors: list[Vector] = []
        self.usage = Usage.of(sum(map(len, prompts)), completion_tokens=0, cached_tokens=0)
        self.device_us = 0
        self.finish_reason: str | None = None
        self.delivered_tokens = 0

    @property
    def use(self) -> ResourceUse:
        return ResourceUse(self.usage.prompt_tokens, device_us=self.device_us)

    def finish(self, vectors: list[Vector]) -> None:
        self.vectors, self.finish_reason = vectors, "stop"


class Embedder:
    """Embeddings by the parts that generate."""

    def __init__(self, generator: Generator) -> None:
        self.models = generator.models
        self._generator = generator

    async def embed(self, request: ValidEmbedding, tenant: Tenant) -> Embeddings:
        site = self._generator
        with (
            as_api_errors(site.request_timeout_s),
            site.metrics.measure(request.model) as measure,
            site.admission.permit() as permit,
        ):
            async with asyncio.timeout(site.request_timeout_s), self.models.use(request.model) as model:
                pooling = self._check(request, model)
                prompts = await _encode(model, request)
                permit.reserve(request.model, _most_at_once(prompts), 0, self.models.registry.kv_tokens(model))
                embeddings = Embeddings(prompts, pooling)
                measure.answer = embeddings
                submits = [_submit(request.model, prompt, pooling, tenant) for prompt in prompts]
                vectors = await self._all(submits, embeddings)
                embeddings.finish([_shortened(vector, request.dimensions) for vector in vectors])
                measure.note_delta(0)
                return embeddings

    def _check(self, request: ValidEmbedding, model: AwakeModel) -> Pooling:
        """Return how the model's embeddings are pooled. Raises ApiError for a model that makes none, or smaller ones than are wanted."""
        if self.models.adapters.named_in(request.requested_model, request.model) is not None:
            raise ApiError("invalid_request", f"adapters make no embeddings; ask for {request.model!r}", param="model")
        if model.info.pooling is None:
            known = ", ".join(map(repr, self.models.registry.embedding_models())) or "none"
            message = f"{request.requested_model!r} generates text and makes no embeddings; embedding models of this site: {known}"
            raise ApiError("invalid_request", message, param="model")
        if request.dimensions is not None and request.dimensions > model.info.embedding_size:
            size = model.info.embedding_size
            message = (
                f"{request.requested_model!r} makes embeddings of {size} numbers: dimensions must be from 1 to {size}"
            )
            raise ApiError("invalid_request", message, param="dimensions")
        return request.pooling or model.info.pooling

    async def _all(self, submits: list[Submit], embeddings: Embeddings) -> list[Vector]:
        vectors: list[Vector] = [()] * len(submits)

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                vectors[number] = await self._one(submits[number], embeddings)

        numbers = iter(range(len(submits)))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(WINDOW, len(submits))):
                    group.create_task(work(numbers))
        except BaseExceptionGroup as failed:  # the first says enough
            raise failed.exceptions[0] from None
        return vectors

    async def _one(self, submit: Submit, embeddings: Embeddings) -> Vector:
        async with self._generator.engine.generate(submit) as outputs:
            async for output in outputs:
                if output.finish_reason == "abort":
                    raise ApiError("aborted", "the engine was told to end this request")
                embeddings.device_us += output.device_us
                if output.embedding is not None:
                    return output.embedding
        raise EngineError("engine_error", "the engine ended a text without its embedding")


def _most_at_once(prompts: list[tuple[int, ...]]) -> int:
    """Tokens the engine holds of a request, at worst: thousands of texts are not refused for being many, nor others on their account."""
    return sum(sorted(map(len, prompts))[-WINDOW:])


def _submit(model: str, prompt: tuple[int, ...], pooling: Pooling, tenant: Tenant) -> Submit:
    return Submit(os.urandom(16).hex(), model, prompt, SamplingParams(max_tokens=1), tenant.salt, pooling=pooling)


async def _encode(model: AwakeModel, request: ValidEmbedding) -> list[tuple[int, ...]]:
    """Return every text's token ids. Raises ApiError for a text that the model does not take."""
    characters = sum(len(text) for text in request.inputs if isinstance(text, str))

    def encode() -> list[tuple[int, ...]]:
        return [_encode_one(model, text, request.where(i)) for i, text in enumerate(request.inputs)]

    return encode() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


def _encode_one(model: AwakeModel, text: EmbeddingInput, where: str) -> tuple[int, ...]:
    tokenizer, prompt = (
        model.text.tokenizer,
        model.info.text_prompt,
    )  # not of token ids: it would stand before their BOS
    token_ids = tokenizer.encode(prompt + text, add_special_tokens=True) if isinstance(text, str) else text
    if not token_ids:
        raise ApiError("invalid_request", f"{where} has no tokens; send at least one", param=where)
    limit, vocab = model.info.context_length, model.info.vocab_size
    if len(token_ids) > limit:
        message = f"{where} has {len(token_ids)} tokens and {model.config.name!r} takes {limit}; shorten or split it"
        raise ApiError("context_length_exceeded", message, param=where)
    if (largest := max(token_ids)) >= vocab:
        message = f"{where} has the token id {largest}, outside the vocabulary of {vocab} tokens"
        raise ApiError("invalid_request", message, param=where)
    return token_ids


def _shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first numbers of a vector, at length 1 again: models that are trained for it (Matryoshka) put the most telling ones first."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept))
    return tuple(x / length for x in kept) if length else kept
