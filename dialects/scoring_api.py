"""Scores of texts: documents ranked by a query, scores of pairs, and class probabilities.

The forms are those of Jina, Cohere, vLLM and text-embeddings-inference."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from pilotlight.dialects.body.bodies import Body
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.body.parsing import Resolve, known_model, parse_body
from pilotlight.dialects.requests import ScoredText, ValidScoring
from pilotlight.wire.errors import ApiError

MAX_DOCUMENTS = 2048  # limit of one request, as at Jina
COHERE_DOCUMENT_TOKENS = 4096  # tokens to which version 2 of Cohere's rerank API cuts a document by default

_Query = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]


def read_documents(value: Any) -> Any:
    """Convert a list of texts, or of objects with a `text`, to a list of texts."""
    if not isinstance(value, list) or not value:
        raise ValidationError('must be a list of texts, or of objects such as {"text": "..."}; not empty')
    if len(value) > MAX_DOCUMENTS:
        raise ValidationError(f"has {len(value)} documents; send at most {MAX_DOCUMENTS} in one request")
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValidationError(f'document {position} is neither a text nor an object such as {{"text": "..."}}')
    return texts


def read_texts(value: Any) -> Any:
    """Convert a string or a list of texts to a list of texts."""
    return read_documents([value] if isinstance(value, str) else value)


def read_fields(value: Any) -> Any:
    """Return the value of `rank_fields`. Raises ValidationError if it has any field but "text"."""
    if value not in ([], ["text"]):
        raise ValidationError('must be ["text"]: documents are ranked by their text alone; join other fields to it')
    return value


class RerankBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"documents": read_documents, "texts": read_documents, "rank_fields": read_fields}

    model: str
    query: _Query
    documents: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None  # text-embeddings-inference's name for the documents
    top_n: _Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None  # text-embeddings-inference's name for `return_documents`
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    truncate_prompt_tokens: Literal[-1] | None = None  # vLLM's name for `truncate`
    max_tokens_per_doc: _Count | None = None
    rank_fields: tuple[str, ...] | None = None
    instruction: Annotated[str, Meta(max_length=10_000)] | None = None
    instruct: Annotated[str, Meta(max_length=10_000)] | None = None  # SGLang's name for `instruction`


class ScoreBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = dict.fromkeys(("text_1", "text_2", "queries", "documents"), read_texts)

    model: str
    text_1: tuple[str, ...] | None = None
    text_2: tuple[str, ...] | None = None
    queries: tuple[str, ...] | None = None  # this field and the next are vLLM's names for text_1 and text_2
    documents: tuple[str, ...] | None = None
    truncate_prompt_tokens: Literal[-1] | None = None
    instruction: Annotated[str, Meta(max_length=10_000)] | None = None


class ClassifyBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input": read_texts}

    model: str
    input: tuple[str, ...]
    truncate_prompt_tokens: Literal[-1] | None = None


def parse_rerank(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidScoring:
    """Parse a rerank body of Jina, Cohere (version 1) or text-embeddings-inference. Raises ApiError."""
    body, ignored = parse_body(RerankBody, raw, strict)
    if (body.documents is None) == (body.texts is None):
        raise ApiError("invalid_request", "documents: send documents or texts", param="documents")
    is_bare = body.texts is not None
    returns_texts = bool(body.return_text) if is_bare else body.return_documents is not False
    return _reranking(body, resolve, ignored, is_bare=is_bare, returns_texts=returns_texts)


def parse_rerank_v2(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidScoring:
    """Parse a rerank body of Cohere (version 2), which cuts documents that are too long. Raises ApiError."""
    body, ignored = parse_body(RerankBody, raw, strict)
    if body.documents is None:
        raise ApiError("invalid_request", "documents: required", param="documents")
    most = body.max_tokens_per_doc or COHERE_DOCUMENT_TOKENS
    returns_texts = bool(body.return_documents)
    return _reranking(body, resolve, ignored, returns_texts=returns_texts, most_second_tokens=most, truncates=True)


def _reranking(
    body: RerankBody,
    resolve: Resolve,
    ignored: tuple[str, ...],
    *,
    returns_texts: bool,
    is_bare: bool = False,
    most_second_tokens: int | None = None,
    truncates: bool = False,
) -> ValidScoring:
    field, documents = ("texts", body.texts) if is_bare else ("documents", body.documents)
    assert documents is not None
    asks = bool(body.truncate) or body.truncate_prompt_tokens is not None or body.max_tokens_per_doc is not None
    return ValidScoring(
        known_model(body.model, resolve),
        body.model,
        tuple([ScoredText(body.query, text, f"{field}[{i}]") for i, text in enumerate(documents)]),
        "rerank",
        top_n=body.top_n,
        returns_texts=returns_texts,
        is_raw=bool(body.raw_scores),
        truncates=truncates or asks,
        most_second_tokens=most_second_tokens or body.max_tokens_per_doc,
        instruction=body.instruct if body.instruction is None else body.instruction,
        is_bare=is_bare,
        ignored=ignored,
    )


def parse_score(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidScoring:
    body, ignored = parse_body(ScoreBody, raw, strict)
    names = ("text_1", "text_2") if body.text_1 is not None or body.text_2 is not None else ("queries", "documents")
    first, second = getattr(body, names[0]), getattr(body, names[1])
    for name, texts in zip(names, (first, second), strict=True):
        if texts is None:
            raise ApiError("invalid_request", f"{name}: required", param=name)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        message = (
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send one of the first, or equal numbers"
        )
        raise ApiError("invalid_request", message, param=names[1])
    pairs = [
        ScoredText(one, other, f"{names[1]}[{i}]") for i, (one, other) in enumerate(zip(first, second, strict=True))
    ]
    return ValidScoring(
        known_model(body.model, resolve),
        body.model,
        tuple(pairs),
        "score",
        truncates=body.truncate_prompt_tokens is not None,
        instruction=body.instruction,
        ignored=ignored,
    )


def parse_classify(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidScoring:
    body, ignored = parse_body(ClassifyBody, raw, strict)
    return ValidScoring(
        known_model(body.model, resolve),
        body.model,
        tuple([ScoredText(text, where=f"input[{i}]") for i, text in enumerate(body.input)]),
        "classify",
        truncates=body.truncate_prompt_tokens is not None,
        ignored=ignored,
    )
