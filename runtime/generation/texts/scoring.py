"""Scores of documents for a query, of pairs of texts, and of the classes of texts.

It knows how a model joins two texts, and how logits become scores. Independent of HTTP and dialects.
"""

import asyncio
import math

from pilotlight.dialects.requests import ScoredText, ValidScoring
from pilotlight.engine.api.protocol import Activation
from pilotlight.engine.tokenizer.tokenizer import INLINE_CHARACTERS, Tokenizer
from pilotlight.runtime.generation.generator import Generator
from pilotlight.runtime.generation.texts.pair_template import PairPieces
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


class Scorer:
    def __init__(self, generator: Generator) -> None:
        self._pooler = TextPooler(generator)

    def labels(self, model: str) -> tuple[str, ...]:
        """Return the classes of a loaded model."""
        info = self._pooler.models.registry.info(model)
        return info.labels if info is not None else ()

    async def score(self, request: ValidScoring, tenant: Tenant) -> PooledTexts:
        """Return the scores of each text, one per class. Raises ApiError."""

        async def encode(model: AwakeModel) -> list[EncodedText]:
            self._check(request, model)
            encoder = _Encoder(request, model, await _pieces(request, model))
            characters = sum(len(text.first) + len(text.second or "") for text in request.texts)
            return encoder.all() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encoder.all)

        def activate(model: AwakeModel, logits: list[Vector]) -> list[Vector]:
            kind: Activation = "none" if request.is_raw else model.info.activation
            return [activated(of_text, kind) for of_text in logits]

        return await self._pooler.pool(request, tenant, encode, activate)

    def _check(self, request: ValidScoring, model: AwakeModel) -> None:
        """Raise ApiError if the model does not compute such scores."""
        refuse_adapter(self._pooler, request)
        labels = model.info.labels
        if not labels:
            known = ", ".join(map(repr, self._pooler.models.registry.pooled_models(scores=True))) or "none"
            does = "makes embeddings" if model.info.pooling else "generates text"
            message = f"{request.requested_model!r} {does} and scores no texts; models of this site that do: {known}"
            raise ApiError("invalid_request", message, param="model")
        if request.kind != "classify" and len(labels) > 1:
            message = (
                f"{request.requested_model!r} has {len(labels)} classes, but a pair needs a single score; "
                "use /ai/v1/classify to classify texts"
            )
            raise ApiError("invalid_request", message, param="model")


class _Encoder:
    """Encodes the texts of one request as the model expects them."""

    def __init__(self, request: ValidScoring, model: AwakeModel, pieces: PairPieces | None) -> None:
        """`pieces` come from the model's template for pairs; None if its tokenizer joins pairs."""
        self._request = request
        self._model = model
        self._tokenizer: Tokenizer = model.text.tokenizer
        self._pieces = pieces
        self._instruction = model.info.text_prompt if request.instruction is None else request.instruction

    def all(self) -> list[EncodedText]:
        return [self._fitting(text) for text in self._request.texts]

    def _fitting(self, text: ScoredText) -> EncodedText:
        """Encode a text, truncated if the request allows it. Raises ApiError if it does not fit."""
        most, limit = self._request.most_second_tokens, self._model.info.context_length
        if text.second is not None and most is not None:
            text = ScoredText(text.first, self._tokenizer.cut(text.second, most), text.where)
        encoded = self._encoded(text)
        while self._request.truncates and len(encoded.token_ids) > limit:
            long = text.first if text.second is None else text.second
            kept = len(self._tokenizer.encode(long)) - (len(encoded.token_ids) - limit)
            if kept < 0:  # the query alone is too long
                break
            shorter = self._tokenizer.cut(long, kept)
            if shorter == long:
                break
            first, second = (shorter, None) if text.second is None else (text.first, shorter)
            text = ScoredText(first, second, text.where)
            encoded = self._encoded(text)
        check_tokens(self._model, encoded.token_ids, text.where, "shorten it, or ask for truncation (truncate: true)")
        return encoded

    def _encoded(self, text: ScoredText) -> EncodedText:
        if text.second is None or self._pieces is None:
            first = self._instruction + text.first
            if text.second is None:
                return EncodedText(self._tokenizer.encode(first, add_special_tokens=True))
            return EncodedText(*self._tokenizer.encode_pair(first, text.second))
        shield = self._tokenizer.shield
        filled = {"system": self._instruction, "query": shield(text.first), "document": shield(text.second)}
        if self._request.instruction is not None:
            filled["system"] = shield(self._instruction)
        return EncodedText(self._tokenizer.encode_rendered(self._pieces.text(filled)))


async def _pieces(request: ValidScoring, model: AwakeModel) -> PairPieces | None:
    """Return the pieces of the model's template for pairs; None if its tokenizer joins pairs.

    Raises ApiError for an instruction without a place in the template, and for a template without the roles that the model needs."""
    if request.texts[0].second is None:
        if request.instruction is not None:
            raise ApiError(
                "invalid_request", "instruction: single texts are classified without one", param="instruction"
            )
        return None
    pairs, pieces = model.text.pairs, None
    needs_template = model.info.answers_by_token or pairs.is_required
    # As in sentence-transformers since version 6, any template that has both roles is used.
    if needs_template or pairs.may_be_used:
        is_instructed = request.instruction is not None or bool(model.info.text_prompt)
        pieces = await pairs.pieces(with_instruction=is_instructed)
        if pieces is None and request.instruction is None and is_instructed:
            # The template has no place for the checkpoint's own instruction.
            pieces = await pairs.pieces(with_instruction=False)
    if pieces is None and request.instruction is not None:
        message = (
            f"instruction: {request.requested_model!r} has no place for one; leave it out, or put it into the query"
        )
        raise ApiError("invalid_request", message, param="instruction")
    if pieces is None and needs_template:
        message = (
            f"{request.requested_model!r} needs a chat template, and its own has no place for messages of the roles query and document: "
            "put a chat_template.jinja with these roles beside the weights"
        )
        raise ApiError("model_load_failed", message, param="model")
    return pieces


def activated(logits: Vector, kind: Activation) -> Vector:
    """Return the scores of a text's classes from their logits."""
    if kind == "sigmoid":
        return tuple([_sigmoid(x) for x in logits])
    if kind == "softmax":
        largest = max(logits)
        powers = [math.exp(x - largest) for x in logits]
        whole = math.fsum(powers)
        return tuple([power / whole for power in powers])
    return logits


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    power = math.exp(x)  # x is negative here, so exp(-x) could overflow
    return power / (1.0 + power)
