"""Ollama's API: chats, completions, embeddings, information about models, and the lines of an answer.

Source: Ollama's docs/api.md and api/types.go. An answer is a stream of JSON lines (wire/lines.py) unless the request sets `stream` to false. A
model's name may end in `:latest`. Options of Ollama's own runner are listed as ignored. `keep_alive` has no effect, because the site's file
determines how long models stay awake.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.dialects.body.answer_constraints import ANY_OBJECT, schema_constraint
from pilotlight.dialects.body.bodies import (
    LISTS,
    MAX_LOGPROBS,
    Body,
    CallBody,
    CallFunctionBody,
    MessageBody,
    SamplingBody,
    ToolBody,
    at_most,
    not_deep,
)
from pilotlight.dialects.body.images import image_of_base64
from pilotlight.dialects.body.parsing import (
    Resolve,
    conversation_of,
    known_model,
    naming,
    parse_body,
    refused,
    thinking_variables,
)
from pilotlight.dialects.embeddings_api import read_inputs
from pilotlight.dialects.prefix_pieces import canonical, digest_of, pieces
from pilotlight.dialects.requests import (
    AnswerConstraint,
    Conversation,
    Insertion,
    Prompt,
    Sampling,
    ValidEmbedding,
    ValidGeneration,
)
from pilotlight.wire.chat import MAX_ITEMS, TokenLogprob
from pilotlight.wire.errors import ApiError

# The version of Ollama's API. Clients compare it with the version in which a feature was added.
VERSION = "0.12.11"
GENERATING = ("/api/chat", "/api/generate")
# Paths that change the set of models, with an error message that names the alternative.
REFUSED = {
    "/api/create": "models are made elsewhere and named in a site's file",
    "/api/copy": "name a model a second time by `aliases` in its site's file",
    "/api/delete": "take the model out of its site's file",
    "/api/push": "models are not published from here",
    "/api/blobs/{digest}": "models are read from the places that a site's file names",
}
_LATEST = ":latest"
_THINKS = (True, False, "low", "medium", "high", "max")


def plain_name(name: str) -> str:
    """Return a model's name without `:latest`, the tag that Ollama's clients append to names without one."""
    return name.removesuffix(_LATEST)


def _limit(value: Any) -> Any:
    """Return the limit of the answer's length; None (no limit) if it is a number below 1."""
    return None if type(value) is int and value < 1 else value


def _seed(value: Any) -> Any:
    """Return the seed; None (a random seed) if it is a negative number."""
    return None if type(value) is int and value < 0 else value


class OptionsBody(Body, frozen=True, kw_only=True):
    """The sampling options. Options that size Ollama's own runner are left out."""

    READERS: ClassVar = {
        "num_predict": _limit, "seed": _seed, "repeat_penalty": SamplingBody.READERS["repetition_penalty"],
        **{name: SamplingBody.READERS[name] for name in ("stop", "top_k", "top_p")},
    }  # fmt: skip

    num_predict: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(le=2**63 - 1)] | None = None
    stop: tuple[str, ...] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None


class OllamaCallBody(Body, frozen=True, kw_only=True):
    PARTS: ClassVar = {"function": CallFunctionBody}

    function: CallFunctionBody
    id: str | None = None

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Remove fields of an answer's call other than its name and arguments."""
        function = values.get("function")
        if isinstance(function, dict):
            function = {name: function[name] for name in ("name", "arguments") if name in function}
            function.setdefault("arguments", {})
        return {"function": function, "id": values.get("id")}


class OllamaMessageBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"tool_calls": at_most(MAX_ITEMS), "images": at_most(MAX_ITEMS)}
    PARTS: ClassVar = {"tool_calls": OllamaCallBody}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCallBody] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaBody(Body, frozen=True, kw_only=True):
    """The common fields of chats and completions."""

    READERS: ClassVar = {"format": not_deep}
    PARTS: ClassVar = {"options": OptionsBody}

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OptionsBody | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    READERS: ClassVar = {**OllamaBody.READERS, **LISTS}
    PARTS: ClassVar = {**OllamaBody.PARTS, "messages": OllamaMessageBody, "tools": ToolBody}

    messages: list[OllamaMessageBody] | None = None
    tools: list[ToolBody] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    READERS: ClassVar = {**OllamaBody.READERS, "images": at_most(MAX_ITEMS)}

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaEmbedBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input": read_inputs}
    PARTS: ClassVar = {"options": OptionsBody}

    model: str
    input: tuple[str, ...]
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate: bool | None = None
    options: OptionsBody | None = None
    keep_alive: Any = None


class OllamaEmbeddingsBody(Body, frozen=True, kw_only=True):
    """The body of /api/embeddings, the older path, for one text."""

    PARTS: ClassVar = {"options": OptionsBody}

    model: str
    prompt: Annotated[str, Meta(min_length=1)]
    options: OptionsBody | None = None
    keep_alive: Any = None


class ModelBody(Body, frozen=True, kw_only=True):
    """A request for one model. Older clients send its name as `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str:
        """Return the model's name as the client sent it. Raises ApiError if there is none."""
        if not (asked := self.model or self.name):
            raise ApiError("invalid_request", "model is required", param="model")
        return asked


class ValidOllama(ValidGeneration, frozen=True):
    shown_model: str = ""  # name as the client sent it
    is_chat: bool = True
    loads_only: bool = False  # the request only wakes the model and gets no answer
    received_ns: int = msgspec.field(default_factory=time.time_ns)

    @property
    def wants_whole_calls(self) -> bool:
        return True


def parse_chat(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidOllama:
    """Parse a body of /api/chat. Raises ApiError."""
    body, ignored = parse_body(OllamaChatBody, raw, strict)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
    prompt = conversation_of(messages, body.tools)
    return _valid(body, ignored, prompt, resolve, is_chat=True, loads_only=not messages)


def parse_generate(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidOllama:
    """Parse a body of /api/generate. Raises ApiError."""
    body, ignored = parse_body(OllamaGenerateBody, raw, strict)
    for name, instead in _NOT_HERE.items():
        if getattr(body, name):
            raise refused(instead, name, "unsupported_parameter")
    said = body.prompt or ""
    prompt: Prompt = said
    if body.suffix:
        if body.raw or body.system or body.images:
            raise refused("cannot be combined with raw, system or images", "suffix")
        prompt = Insertion(said, body.suffix)
    elif not body.raw:
        asked = OllamaMessageBody(role="user", content=said, images=body.images)
        system = [MessageBody(role="system", content=body.system)] if body.system else []
        prompt = conversation_of([*system, _message(asked, "prompt")], None)
    elif body.images:
        raise refused("a raw prompt has no place for an image", "images")
    return _valid(
        body, ignored, prompt, resolve, is_chat=False, loads_only=not said and not body.images and not body.suffix
    )


_NOT_HERE = {
    "template": "is not supported: the model's own is used; send raw: true with a prompt that you have rendered",
    "context": "is not supported: no context is returned here; send the conversation to /api/chat",
}


def _valid(
    body: OllamaBody, ignored: tuple[str, ...], prompt: Prompt, resolve: Resolve, *, is_chat: bool, loads_only: bool
) -> ValidOllama:
    name = plain_name(body.model)
    options = body.options or OptionsBody()
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("needs logprobs: true", "top_logprobs")
    if isinstance(prompt, Conversation):
        prompt = replace(prompt, variables=_thinking(body.think))
    sampling = Sampling(
        max_tokens=options.num_predict,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        stop=options.stop or (),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ValidOllama(
        model=known_model(name, resolve),
        requested_model=name,
        shown_model=body.model,
        prompt=prompt,
        sampling=sampling,
        stream=body.stream is not False and not loads_only,
        constraint=_constraint(body.format),
        ignored=ignored,
        is_chat=is_chat,
        loads_only=loads_only,
    )


def _message(message: OllamaMessageBody, where: str) -> MessageBody:
    content: Any = message.content or ""
    if message.images:
        with naming(f"{where}.images"):
            images = [image_of_base64(data) for data in message.images]
        content = [*images, content]
    return MessageBody(
        role=message.role,
        content=content,
        name=message.tool_name or message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[CallBody(id=call.id, function=call.function) for call in message.tool_calls or ()] or None,
        reasoning_content=message.thinking,
    )


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if think not in _THINKS:
        raise refused('must be true, false, "low", "medium", "high" or "max"', "think")
    told = thinking_variables(bool(think))
    return told if isinstance(think, bool) else {**told, "reasoning_effort": think}


def _constraint(form: str | dict[str, Any] | None) -> AnswerConstraint | None:
    if form is None or form == "":
        return None
    if form == "json":
        return ANY_OBJECT
    if isinstance(form, str):
        raise refused('must be "json" or a JSON schema', "format")
    with naming("format"):
        return schema_constraint(form)


class ValidOllamaEmbedding(ValidEmbedding, frozen=True):
    shown_model: str = ""
    received_ns: int = msgspec.field(default_factory=time.time_ns)


def parse_embed(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidOllamaEmbedding:
    """Parse a body of /api/embed. Raises ApiError."""
    body, ignored = parse_body(OllamaEmbedBody, raw, strict)
    return _embedding(body.model, body.input, resolve, ignored, "input", body.dimensions)


def parse_embeddings(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidOllamaEmbedding:
    """Parse a body of /api/embeddings. Raises ApiError."""
    body, ignored = parse_body(OllamaEmbeddingsBody, raw, strict)
    return _embedding(body.model, (body.prompt,), resolve, ignored, "prompt")


def _embedding(
    model: str,
    inputs: tuple[str, ...],
    resolve: Resolve,
    ignored: tuple[str, ...],
    field: str,
    dimensions: int | None = None,
) -> ValidOllamaEmbedding:
    name = plain_name(model)
    known = known_model(name, resolve)
    return ValidOllamaEmbedding(
        known, name, inputs, dimensions=dimensions, field=field, ignored=ignored, shown_model=model
    )


def parse_model(raw: bytes) -> str:
    """Parse a body that names one model; return the name as the client sent it. Raises ApiError."""
    body, _ = parse_body(ModelBody, raw, strict=False)
    return body.asked


def routing_fields(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body's fields for a router, with the other dialects' names and Ollama's defaults."""
    model, options = fields.get("model") or fields.get("name"), fields.get("options")
    read = {**fields, "model": plain_name(model)} if isinstance(model, str) else dict(fields)
    if path in GENERATING:
        read["stream"] = fields.get("stream") is not False
    if isinstance(options, dict):
        read["max_tokens"] = options.get("num_predict")
    return read


def prompt_pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a prompt that later turns repeat, and whether each identifies a conversation."""
    messages, system = fields.get("messages"), fields.get("system")
    if not isinstance(messages, list):
        if isinstance(system, str) and system:
            yield canonical(["system", system]), False
        yield from pieces({"prompt": fields.get("prompt"), "image": fields.get("images") or None})
        return
    user_has_spoken = False
    for message in messages:
        user_has_spoken = user_has_spoken or message.get("role") != "system"
        images = message.get("images")
        seen = [digest_of(image).decode() for image in images] if isinstance(images, list) else None
        yield canonical([message.get("role"), message.get("content"), message.get("tool_calls"), seen]), user_has_spoken


def fixed_routes() -> Iterator[Route]:
    """Yield the routes that are the same at sites and routers: the version, and refusals to change models."""

    async def version(request: Request) -> Response:
        return Response(msgspec.json.encode({"version": VERSION}), media_type="application/json")

    yield Route("/api/version", version)
    for path, instead in REFUSED.items():

        async def refuse(request: Request, instead: str = instead) -> Response:
            raise ApiError("not_implemented", f"{request.url.path} changes nothing here: {instead}")

        yield Route(path, refuse, methods=["POST", "DELETE", "HEAD"])


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw  # a JSON object
    index: int


class OllamaCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct, frozen=True):
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: tuple[OllamaCall, ...] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaEnd(msgspec.Struct, frozen=True):
    """The end of an answer. Durations are in nanoseconds, measured at the site that finished the answer."""

    done_reason: Literal["stop", "length", "load"]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


def answer_line(
    request: ValidOllama,
    message: OllamaMessage,
    end: OllamaEnd | None = None,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> bytes:
    """Return a line of a stream. With `end` it is the last line, or a whole answer."""
    fields: dict[str, Any] = {"model": request.shown_model, "created_at": timestamp(time.time())}
    if request.is_chat:
        fields["message"] = message
    else:
        fields["response"] = message.content
        if message.thinking is not UNSET:
            fields["thinking"] = message.thinking
    fields["done"] = end is not None
    if logprobs:
        fields["logprobs"] = logprobs
    if end is not None:
        fields |= msgspec.structs.asdict(end)
    return msgspec.json.encode(fields)


def timestamp(at_s: float) -> str:
    """Return seconds since the epoch in the form of RFC 3339."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
