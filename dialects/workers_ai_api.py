"""Workers AI's `run` of a text model, an embedding model or a reranker."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import replace

from pilotlight.dialects.body.bodies import (
    LISTS,
    Body,
    MessageBody,
    SamplingBody,
    TokenIds,
    ToolBody,
    ToolChoice,
    objects,
    read_tool_choice,
)
from pilotlight.dialects.body.images import Content, ImagePart, read_image
from pilotlight.dialects.body.parsing import (
    Resolve,
    constraint_in,
    conversation_of,
    known_model,
    parse_body,
    prompt_options,
    sampling_of,
)
from pilotlight.dialects.embeddings_api import read_inputs
from pilotlight.dialects.requests import Prompt, ScoredText, ValidEmbedding, ValidGeneration, ValidScoring
from pilotlight.dialects.scoring_api import MAX_DOCUMENTS
from pilotlight.wire.errors import ApiError

USUAL_MAX_TOKENS = 256  # Cloudflare's default for text models; some models have another one


class RunToolBody(ToolBody, frozen=True, kw_only=True):
    """A tool. Workers AI's form is the function without OpenAI's wrapping; both are accepted."""

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "type" not in values and "function" not in values:
            return {"type": "function", "function": values}
        return values


class RunBody(SamplingBody, frozen=True, kw_only=True):
    """Inputs of a text model at /ai/run: a prompt or messages, and an image with either."""

    READERS: ClassVar = {**SamplingBody.READERS, **LISTS, "tool_choice": read_tool_choice, "image": read_image}
    PARTS: ClassVar = {"messages": MessageBody, "tools": RunToolBody}

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1)] | None = None
    image: ImagePart | None = None
    raw: bool | None = None
    tools: list[RunToolBody] | None = None
    tool_choice: ToolChoice | None = None
    lora: Annotated[str, Meta(max_length=200)] | None = None


class RunEmbeddingBody(Body, frozen=True, kw_only=True):
    """Inputs of an embedding model at /ai/run."""

    READERS: ClassVar = {"text": read_inputs}

    text: tuple[str | TokenIds, ...]
    pooling: Literal["mean", "cls"] | None = None


class ContextBody(Body, frozen=True, kw_only=True):
    """A text that is ranked."""

    text: str


class RunRerankerBody(Body, frozen=True, kw_only=True):
    """Inputs of a reranker at /ai/run."""

    READERS: ClassVar = {"contexts": objects(MAX_DOCUMENTS)}
    PARTS: ClassVar = {"contexts": ContextBody}

    query: Annotated[str, Meta(min_length=1)]
    contexts: Annotated[list[ContextBody], Meta(min_length=1)]
    top_k: Annotated[int, Meta(ge=1)] | None = None


class FinetuneBody(Body, frozen=True, kw_only=True):
    """The body that creates a fine-tune at /ai/finetunes."""

    model: Annotated[str, Meta(min_length=1, max_length=200)]
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    description: Annotated[str, Meta(max_length=1000)] = ""
    public: bool = False


class ValidRun(ValidGeneration, frozen=True):
    @property
    def wants_whole_calls(self) -> bool:
        return True


def parse_run(raw: bytes, resolve: Resolve, model: str, *, strict: bool = False) -> ValidRun:
    known = known_model(model, resolve)
    body, ignored = parse_body(RunBody, raw, strict)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("invalid_request", "give either prompt or messages", param="prompt")
    prompt: Prompt
    tools = body.tools if body.tool_choice != "none" else None
    if body.raw and body.prompt is not None:
        if body.image is not None:
            raise ApiError("invalid_request", "image: a raw prompt has no place for an image", param="image")
        prompt = body.prompt
    else:
        messages = body.messages or [MessageBody(role="user", content=body.prompt)]
        messages = messages if body.image is None else _with_image(messages, body.image)
        prompt = conversation_of(messages, tools, tool_choice=body.tool_choice)
    sampling = replace(sampling_of(body, body.max_tokens, num_logprobs=None), usual_max_tokens=USUAL_MAX_TOKENS)
    constraint = constraint_in(body)
    return ValidRun(
        known,
        model,
        prompt,
        sampling,
        bool(body.stream),
        constraint=constraint,
        ignored=ignored,
        lora=body.lora or None,
        **prompt_options(body),
    )


def parse_finetune(raw: bytes) -> FinetuneBody:
    """Parse the body that creates a fine-tune. Raises ApiError."""
    body, _ = parse_body(FinetuneBody, raw, strict=False)
    if body.public:
        sentence = (
            "public: uploaded adapters belong to one account; those for all accounts go into the site's file "
            "or a model's adapters_dir"
        )
        raise ApiError("unsupported_parameter", sentence, param="public")
    return body


def _with_image(messages: list[MessageBody], image: ImagePart) -> list[MessageBody]:
    """Put the image at the beginning of the last user message. Raises ApiError without a user message."""
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        raise ApiError("invalid_request", "image: it needs a user message, and there is none", param="image")
    said = messages[last].content or ""
    content: Content = [image, *([said] if isinstance(said, str) else said)]
    return [*messages[:last], replace(messages[last], content=content), *messages[last + 1 :]]


def parse_run_embedding(raw: bytes, resolve: Resolve, model: str, *, strict: bool = False) -> ValidEmbedding:
    known = known_model(model, resolve)
    body, ignored = parse_body(RunEmbeddingBody, raw, strict)
    return ValidEmbedding(known, model, body.text, pooling=body.pooling, field="text", ignored=ignored)


def parse_run_reranker(raw: bytes, resolve: Resolve, model: str, *, strict: bool = False) -> ValidScoring:
    known = known_model(model, resolve)
    body, ignored = parse_body(RunRerankerBody, raw, strict)
    texts = [ScoredText(body.query, context.text, f"contexts[{i}].text") for i, context in enumerate(body.contexts)]
    return ValidScoring(known, model, tuple(texts), "rerank", top_n=body.top_k, ignored=ignored)
