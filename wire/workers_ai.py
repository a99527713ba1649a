"""Cloudflare Workers AI's forms: the envelope, a text model's result, and its stream's events."""

from collections.abc import Mapping, Sequence
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from pilotlight.wire.chat import FinishReason, Usage
from pilotlight.wire.http.asgi import query_number

PER_PAGE = 50  # items on a page of a list, if the client does not specify it
MOST_PER_PAGE = 999_999_999

ResultT = TypeVar("ResultT")


class Call(msgspec.Struct, frozen=True):
    """A tool call. Its arguments are an object; in OpenAI's form they are a string."""

    name: str
    arguments: msgspec.Raw  # the object as the model wrote it, because a number in it may exceed Python's floats


class TextResult(msgspec.Struct, frozen=True):
    """The envelope's `result`, and each event of a stream, in which only the last one has `usage`."""

    response: str
    tool_calls: tuple[Call, ...] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    # Not in Cloudflare's form: the finish reason, in a stream's last event.
    reasoning_content: str | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET


class EmbeddingResult(msgspec.Struct, frozen=True):
    shape: tuple[int, int]  # number of texts, and of numbers per text
    data: tuple[tuple[float, ...], ...]
    pooling: str


class RankedContext(msgspec.Struct, frozen=True):
    id: int  # position among the request's contexts
    score: float


class RerankerResult(msgspec.Struct, frozen=True):
    response: tuple[RankedContext, ...]


class Task(msgspec.Struct, frozen=True):
    id: str = "c329a1f9-323d-4e91-b2aa-582dd4188d34"  # Cloudflare's id of text generation
    name: str = "Text Generation"
    description: str = "Family of generative text models, such as large language models (LLM)."


CLASSIFICATION_TASK = Task(
    "00cd182b-bf30-4fc4-8481-84a3ab349657",
    "Text Classification",
    "Models that score texts: classify a text, or rate how well one text answers another.",
)
EMBEDDING_TASK = Task(
    "0137cdcf-162a-4108-94f2-1ca59e8c65ee", "Text Embeddings", "Models that turn a text into a vector of numbers."
)


class TokenState(msgspec.Struct, frozen=True):
    """The answer to the question whether a key is valid."""

    id: str
    status: Literal["active"] = "active"


class Property(msgspec.Struct, frozen=True):
    property_id: str
    value: str


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    name: str
    description: str
    properties: tuple[Property, ...] = ()
    task: Task = Task()
    tags: tuple[str, ...] = ()
    source: int = 1


class ListedFinetune(msgspec.Struct, frozen=True):
    """A fine-tune as Cloudflare lists one."""

    id: str
    created_at: str
    modified_at: str
    model: str
    name: str
    description: str = ""
    public: bool = False


class FinetuneAsset(msgspec.Struct, frozen=True):
    """A stored file of a fine-tune."""

    finetune_id: str
    file_name: str
    created_at: str
    modified_at: str


class ResultInfo(msgspec.Struct, frozen=True):
    """Describes the page of a list that a response contains."""

    page: int  # number of the page; the first is 1
    per_page: int
    count: int  # items on this page
    total_count: int


class Envelope(msgspec.Struct, Generic[ResultT], frozen=True):
    result: ResultT
    success: bool = True
    errors: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    result_info: ResultInfo | UnsetType = UNSET  # set only in responses with a list


def page_of(listed: Sequence[ResultT], query: Mapping[str, str]) -> tuple[Sequence[ResultT], ResultInfo]:
    """Return the page of a list that `page` and `per_page` of a query select. Raises ApiError."""
    page, per_page = query_number(query, "page", 1, least=1), query_number(query, "per_page", PER_PAGE, least=1)
    shown = listed[(page - 1) * per_page : page * per_page]
    return shown, ResultInfo(page, per_page, len(shown), len(listed))
