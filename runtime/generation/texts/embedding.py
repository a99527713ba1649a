"""Embeddings of a request's texts, with their prompts and `dimensions`.

Independent of HTTP and dialects.
"""

import asyncio
import math

from pilotlight.dialects.requests import EmbeddingInput, ValidEmbedding
from pilotlight.engine.tokenizer.tokenizer import INLINE_CHARACTERS
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.pooled_texts import (
    EncodedText,
    PooledTexts,
    TextPooler,
    Vector,
    check_tokens,
    refuse_adapter,
)
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.wire.credentials import Tenant
from pilotlight.wire.errors import ApiError


class Embedder:
    def __init__(self, generator: Generator) -> None:
        self._pooler = TextPooler(generator)

    async def embed(self, request: ValidEmbedding, tenant: Tenant) -> PooledTexts:
        """Return a vector for each text. Raises ApiError."""

        async def encode(model: AwakeModel) -> list[EncodedText]:
            self._check(request, model)
            return await _encode(model, request)

        def shorten(model: AwakeModel, vectors: list[Vector]) -> list[Vector]:
            return [_shortened(vector, request.dimensions) for vector in vectors]

        return await self._pooler.pool(request, tenant, encode, shorten)

    def _check(self, request: ValidEmbedding, model: AwakeModel) -> None:
        """Raise ApiError if the model makes no embeddings, or has fewer dimensions than requested."""
        refuse_adapter(self._pooler, request)
        if model.info.pooling is None or model.info.labels:
            known = ", ".join(map(repr, self._pooler.models.registry.pooled_models(scores=False))) or "none"
            does = "scores texts" if model.info.labels else "generates text"
            message = (
                f"{request.requested_model!r} {does} and makes no embeddings; embedding models of this site: {known}"
            )
            raise ApiError("invalid_request", message, param="model")
        if request.dimensions is not None and request.dimensions > model.info.embedding_size:
            size = model.info.embedding_size
            message = (
                f"{request.requested_model!r} makes embeddings of {size} numbers: dimensions must be from 1 to {size}"
            )
            raise ApiError("invalid_request", message, param="dimensions")


async def _encode(model: AwakeModel, request: ValidEmbedding) -> list[EncodedText]:
    """Return every text's token ids. Raises ApiError for a text that the model cannot process."""
    characters = sum(len(text) for text in request.inputs if isinstance(text, str))
    prompt = named_prompt(model, request.prompt_name)

    def encode() -> list[EncodedText]:
        return [
            EncodedText(_encode_one(model, prompt, text, request.where(i))) for i, text in enumerate(request.inputs)
        ]

    return encode() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)


def named_prompt(model: AwakeModel, name: str | None) -> str:
    """Return the checkpoint's prompt of this name, or its default for None. Raises ApiError."""
    if name is None:
        return model.info.text_prompt
    prompts = dict(model.info.prompts)
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        sentence = f"{model.config.name!r} has no prompt named {name[:100]!r}; its prompts: {known}"
        raise ApiError("invalid_request", sentence, param="prompt_name")
    return prompts[name]


def _encode_one(model: AwakeModel, prompt: str, text: EmbeddingInput, where: str) -> tuple[int, ...]:
    """Return the token ids of a prompt and text.
    A text that was sent as token ids gets no prompt, because it starts with its own BOS token."""
    tokenizer = model.text.tokenizer
    token_ids = tokenizer.encode(prompt + text, add_special_tokens=True) if isinstance(text, str) else text
    check_tokens(model, token_ids, where, "shorten or split it")
    return token_ids


def _shortened(vector: Vector, dimensions: int | None) -> Vector:
    """Return the first `dimensions` numbers of a vector, rescaled to length 1.

    Models trained for this (Matryoshka) put the most informative numbers first."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept))
    return tuple(x / length for x in kept) if length else kept
