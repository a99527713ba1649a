"""OpenAI's forms of an answer: whole objects, and the chunks of a stream.

These are frozen structs with the fields that OpenAI documents, so that encoding one gives the wire format. UNSET fields are left out; None is written
as null, because clients distinguish the two.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

# Limits on the shape of a request. A body's size is limited already, but a few bytes can describe so many objects that checking them takes seconds.
MAX_MESSAGES = 8192
MAX_ITEMS = 1024  # parts or tool calls of a message, or tools
MAX_NESTING = 100  # nesting depth of a tool's schema, or of a call's arguments
FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    image_tokens: int | UnsetType = UNSET  # not in OpenAI's form: tokens of images in the prompt


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    # accepted drafts of speculative decoding, as counted by the site that finished the answer
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0  # predicted tokens that were rejected; they are not completion tokens


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        reasoning_tokens: int = 0,
        accepted_drafts: int = 0,
        rejected_drafts: int = 0,
        image_tokens: int = 0,
    ) -> "Usage":
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens, image_tokens or UNSET),
            CompletionTokensDetails(reasoning_tokens, accepted_drafts, rejected_drafts),
        )


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # a JSON object, as text


class CustomCall(msgspec.Struct, frozen=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    input: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of a tool call.
    The first part has the call's id, type and name; later parts have more of its arguments."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class MessageDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    # Not in OpenAI's form: the reasoning under DeepSeek's and vLLM's names, because clients read one or the other.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: MessageDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: tuple[int, ...] | UnsetType = UNSET  # not in OpenAI's form: sent if requested


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a chat stream.
    If the request asks for usage, `usage` is null in all chunks but the last, unless it asks for usage in every chunk."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # in the first chunk of each choice
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Message(msgspec.Struct, frozen=True):
    content: str | None
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: tuple[int, ...] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """The logarithm of a prompt token's probability, in vLLM's form."""

    logprob: float
    rank: int | None  # 1 for the most likely token
    decoded_token: str


# one dict per prompt token, by token id; None for the first
PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # not in OpenAI's form: sent if requested
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The parallel lists of the older endpoint; `text_offset` counts characters from the answer's start.

    The first token of an echoed prompt has no probability.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    index: int = 0
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # in the first event of each choice


class Completion(msgspec.Struct, frozen=True):
    """A response of the completions endpoint, or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class ListedModel(msgspec.Struct, frozen=True):
    id: str
    created: int
    context_length: int | UnsetType = UNSET  # not in OpenAI's form: known once the model has been loaded
    max_model_len: int | UnsetType = UNSET  # context_length under vLLM's name
    kv_cache_tokens: int | UnsetType = UNSET  # tokens that its KV cache can hold while no other model needs the memory
    dtype: str | UnsetType = UNSET  # data type of its computations
    stored_dtypes: tuple[str, ...] | UnsetType = UNSET  # data types of its checkpoint, by safetensors' names
    weights_bytes: int | UnsetType = UNSET
    saved_bytes: int | UnsetType = UNSET  # bytes that 12-bit weights save
    # Not in OpenAI's form. A `completion` model has no chat template, so its prompts are plain texts; a `classification` model scores classes of
    # texts.
    type: Literal["chat", "completion", "embedding", "rerank", "classification"] | UnsetType = UNSET
    embedding_size: int | UnsetType = UNSET  # length of an embedding model's vectors
    labels: tuple[str, ...] | UnsetType = UNSET  # names of a classification model's classes
    input_modalities: tuple[Literal["text", "image"], ...] | UnsetType = UNSET  # named as by OpenRouter
    root: str | UnsetType = UNSET  # for an adapter: its own name
    parent: str | UnsetType = UNSET  # for an adapter: the model that it changes
    owned_by: str = "pilotlight"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ListedModel, ...]
    object: Literal["list"] = "list"
