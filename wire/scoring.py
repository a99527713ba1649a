"""The forms of scores: those of Jina and Cohere, of text-embeddings-inference, and of vLLM.

The first two sort documents by relevance; vLLM's are scores of pairs, and classes of texts.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class ScoringUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class RankedText(msgspec.Struct, frozen=True):
    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    index: int  # position among the documents of the request
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str


class RerankMeta(msgspec.Struct, frozen=True):
    """Fields that Cohere's clients read."""

    api_version: ApiVersion
    tokens: dict[str, int]


class RerankResult(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: tuple[RankedDocument, ...]
    usage: ScoringUsage
    meta: RerankMeta


class ScoredPosition(msgspec.Struct, frozen=True):
    """A document of text-embeddings-inference's list."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class PairScore(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class TextClasses(msgspec.Struct, frozen=True):
    index: int
    label: str  # label of the most likely class
    probs: tuple[float, ...]
    num_classes: int


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: tuple[PairScore, ...]
    usage: ScoringUsage
    object: Literal["list"] = "list"


class ClassList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: tuple[TextClasses, ...]
    usage: ScoringUsage
    object: Literal["list"] = "list"
