"""Cloudflare Workers AI's native shapes: the envelope, a text model's result, and the events of its stream.

The module refuses to know where the tokens come from.
"""

from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from wire.chat import FinishReason, Usage

ResultT = TypeVar("ResultT")


class Call(msgspec.Struct, frozen=True):
    """A tool call; the native shape carries the arguments as an object, OpenAI's as text."""

    name: str
    arguments: msgspec.Raw  # the object as it was written: a number in it may be one that Python has no float for


class TextResult(msgspec.Struct, frozen=True):
    """`result` of the envelope, and each event of a stream: there `usage` comes with the last one only."""

    response: str
    tool_calls: tuple[Call, ...] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    # Beyond Cloudflare's fields; why the answer has ended comes with the last event of a stream.
    reasoning_content: str | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET


class EmbeddingResult(msgspec.Struct, frozen=True):
    shape: tuple[int, int]  # texts, numbers of each
    data: tuple[tuple[float, ...], ...]
    pooling: str


class Task(msgspec.Struct, frozen=True):
    id: str = "c329a1f9-323d-4e91-b2aa-582dd4188d34"  # Cloudflare's id of text generation
    name: str = "Text Generation"
    description: str = "Family of generative text models, such as large language models (LLM)."


EMBEDDING_TASK = Task(
    "0137cdcf-162a-4108-94f2-1ca59e8c65ee", "Text Embeddings", "Models that turn a text into a vector of numbers."
)


class TokenState(msgspec.Struct, frozen=True):
    """What is told of a key that is asked whether it works."""

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
    """A file of a fine-tune that was kept."""

    finetune_id: str
    file_name: str
    created_at: str
    modified_at: str


class ResultInfo(msgspec.Struct, frozen=True):
    """Which part of a list a result is."""

    page: int  # from 1
    per_page: int
    count: int  # of this page
    total_count: int


class Envelope(msgspec.Struct, Generic[ResultT], frozen=True):
    result: ResultT
    success: bool = True
    errors: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    result_info: ResultInfo | UnsetType = UNSET  # of lists
