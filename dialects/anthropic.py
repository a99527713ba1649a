"""Anthropic's Messages: the request body, its translation, the answer and the events of its stream.

Sources: Anthropic's reference of POST /v1/messages, of counting tokens and of streaming. Prompts are always cached, so `cache_control` changes
nothing. Thinking blocks are accepted with any signature, because this server does not sign them.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from pilotlight.dialects.blocks import Block, BlockWriter
from pilotlight.dialects.body.answer_constraints import schema_constraint
from pilotlight.dialects.body.bodies import (
    LISTS,
    MAX_STOPS,
    AllowedToolsBody,
    Body,
    CallBody,
    CallFunctionBody,
    FunctionBody,
    MessageBody,
    StopStrings,
    ToolBody,
    ToolChoice,
    not_deep,
    object_or_text,
    objects,
    read_top_p,
)
from pilotlight.dialects.body.images import Content, ImagePart, image_at, image_of_base64, joined
from pilotlight.dialects.body.parsing import (
    Resolve,
    conversation_of,
    known_model,
    naming,
    parse_body,
    refused,
    string_in,
    thinking_variables,
)
from pilotlight.dialects.body.text_files import NO_PDF, file_in
from pilotlight.dialects.prefix_pieces import canonical, without_billing, without_pixels
from pilotlight.dialects.requests import AnswerConstraint, Sampling, ValidGeneration
from pilotlight.wire.chat import MAX_ITEMS, FinishReason, TokenLogprob, Usage
from pilotlight.wire.errors import ANTHROPIC_VERSION, ApiError
from pilotlight.wire.sse import encode_event

# Clients of this dialect send this header, also on paths that several dialects share.
VERSION_HEADER = ANTHROPIC_VERSION.decode()
FINAL_EVENTS = frozenset({b"message_stop"})
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_LABELS = ("cache_control", "citations")  # fields of a block that do not change its content

# Schema of an answer that is not streamed.
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "id": {"type": "string"}, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": {"type": "string"},
        "content": {"type": "array", "items": {
            "type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}}}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object", "required": ["input_tokens", "output_tokens", "cache_read_input_tokens"]},
    },
}  # fmt: skip

_encoder = msgspec.json.Encoder()
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _read_content(value: Any) -> Any:
    """Convert the content of a message, which is a string or a list of blocks.

    A tool call's input that is nested too deep becomes text, because an earlier answer may have contained such a call."""
    if not isinstance(value, list):
        return value
    return objects(MAX_ITEMS)([
        {**block, "input": object_or_text(block["input"])}
        if isinstance(block, dict) and block.get("type") == "tool_use" and isinstance(block.get("input"), dict)
        else block
        for block in value
    ])  # fmt: skip


class MessageTurnBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"content": _read_content}

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesToolBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input_schema": not_deep}

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Remove the settings of Anthropic's own tools: keep only name and type."""
        if values.get("type") in (None, "custom"):
            return values
        return {name: value for name, value in values.items() if name in ("name", "type")}


class MessagesBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {**LISTS, "system": objects(MAX_ITEMS), "top_p": read_top_p}
    PARTS: ClassVar = {"messages": MessageTurnBody, "tools": MessagesToolBody}

    model: str
    messages: Annotated[list[MessageTurnBody], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[StopStrings, Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[MessagesToolBody] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: Any = None


def parse_messages(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidGeneration:
    """Parse a body of /v1/messages. Raises ApiError."""
    body, ignored = parse_body(MessagesBody, raw, strict)
    if body.max_tokens is None:
        raise ApiError("invalid_request", "max_tokens is required", param="max_tokens")
    return _valid(body, ignored, body.max_tokens, resolve, strict=strict)


def parse_count(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidGeneration:
    """Parse a body of /v1/messages/count_tokens. Raises ApiError."""
    body, ignored = parse_body(MessagesBody, raw, strict)
    return _valid(body, ignored, 1, resolve, strict=strict)


def _valid(
    body: MessagesBody, ignored: tuple[str, ...], max_tokens: int, resolve: Resolve, *, strict: bool
) -> ValidGeneration:
    left_out: list[str] = []
    tools = list(_tools(body.tools or (), left_out))
    if strict and left_out:
        where = left_out[0].partition(" ")[0]
        raise refused("is Anthropic's own; declare tools by input_schema", f"{where}.type", "unsupported_parameter")
    choice, parallel = _tool_choice(body.tool_choice)
    messages = list(_messages(body, left_out))
    conversation = conversation_of(messages, [] if choice == "none" else tools, parallel=parallel, tool_choice=choice)
    variables = _thinking(body)
    continues = body.messages[-1].role == "assistant"  # "prefill": the answer continues this message
    if continues and (messages[-1].tool_calls or not str(messages[-1].content or "").strip()):
        raise refused("if the last message is the assistant's, it must end with text", "messages")
    if body.thinking is not None and "budget_tokens" in body.thinking:
        ignored = (*ignored, "thinking.budget_tokens")
    ignored = (*ignored, *left_out)
    return ValidGeneration(
        model=known_model(body.model, resolve),
        requested_model=body.model,
        prompt=msgspec.structs.replace(
            conversation, variables=variables, adds_generation_prompt=not continues, continues_last=continues
        ),
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=tuple(body.stop_sequences or ()),
        ),
        stream=bool(body.stream),
        constraint=_constraint(body),
        ignored=ignored,
    )


def _messages(body: MessagesBody, left_out: list[str]) -> Iterator[MessageBody]:
    if system := without_billing(body.system):
        yield MessageBody(role="system", content=_text(system, "system"))
    for position, message in enumerate(body.messages):
        where = f"messages[{position}].content"
        if message.role == "system":
            if position == 0:
                raise refused('must be "user" or "assistant": instructions before it are `system`', "messages[0].role")
            yield MessageBody(role="system", content=_text(message.content, where))
        elif isinstance(message.content, str):
            yield MessageBody(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, where, left_out)
        else:
            yield from _user(message.content, where, left_out)


def _user(blocks: list[dict[str, Any]], where: str, left_out: list[str]) -> Iterator[MessageBody]:
    """Yield tool results and the user's other content as separate messages, in their order.

    Requests for citations are listed in `left_out`."""
    said: Content = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            if said:
                yield MessageBody(role="user", content=joined(said))
                said = []
            content = block.get("content")
            told = [""] if content is None else _pieces(content, f"{at}.content", left_out)
            call_id = string_in(block, "tool_use_id", at)
            result = joined(told)
            if block.get("is_error"):
                result = f"Error: {result}" if isinstance(result, str) else ["Error:", *result]
            yield MessageBody(role="tool", content=result, tool_call_id=call_id)
        else:
            said += _pieces_of(block, at, left_out)
    if said or not blocks:
        yield MessageBody(role="user", content=joined(said))


def _assistant(blocks: list[dict[str, Any]], where: str, left_out: list[str]) -> MessageBody:
    """Return an assistant's turn. Blocks of Anthropic's own tools are listed in `left_out`."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        match block.get("type"):
            case "tool_use":
                if not isinstance(given := block.get("input"), dict | str):
                    raise refused("must be an object", f"{at}.input")
                function = CallFunctionBody(name=string_in(block, "name", at), arguments=given)
                calls.append(CallBody(id=string_in(block, "id", at), function=function))
            case "thinking":
                thoughts.append(string_in(block, "thinking", at))
            case "redacted_thinking":
                pass  # encrypted by another service; no other service can read it
            case str(kind) if kind == "server_tool_use" or kind.endswith("_tool_result"):
                left_out.append(f"{at} {kind[:50]}")
            case _:
                texts.append(_text_of(block, at))
    return MessageBody(
        role="assistant", content="".join(texts), tool_calls=calls or None, reasoning_content="".join(thoughts) or None
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(block, f"{where}[{i}]") for i, block in enumerate(_blocks(content, where)))


def _pieces(content: Any, where: str, left_out: list[str]) -> Content:
    if isinstance(content, str):
        return [content]
    return [
        piece
        for i, block in enumerate(_blocks(content, where))
        for piece in _pieces_of(block, f"{where}[{i}]", left_out)
    ]


def _pieces_of(block: dict[str, Any], where: str, left_out: list[str]) -> Content:
    """Return the texts and images of a block of a user or of a tool's result."""
    match block.get("citations"):
        case {"enabled": True}:
            left_out.append(f"{where}.citations")
    match block.get("type"):
        case "document":
            return _document(block, where, left_out)
        case "search_result":
            named = [string_in(block, name, where) for name in ("title", "source")]
            return [*named, *_pieces(block.get("content"), f"{where}.content", left_out)]
        case "tool_reference":  # the tool itself is among the request's tools
            return [f"The tool {string_in(block, 'tool_name', where)} can be called now."]
    return [_piece(block, where)]


def _document(block: dict[str, Any], where: str, left_out: list[str]) -> Content:
    named = [string_in(block, name, where) for name in ("title", "context") if block.get(name) is not None]
    if (file := file_in(block)) is not None:
        left_out += [f"{where}.source"] if file.is_pdf else []
        with naming(where):
            return [*named, file.text()]
    match block.get("source"):
        case {"type": "text"}:
            return [*named, string_in(block["source"], "data", f"{where}.source")]
        case {"type": "content", "content": content}:
            return [*named, *_pieces(content, f"{where}.source.content", left_out)]
        case {"type": "url" | "file"}:  # an agent repeats it in all later requests of a session
            left_out.append(f"{where}.source")
            return [*named, NO_PDF]
    raise refused('must have the type "text" or "content"', f"{where}.source")


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise refused("must be a string or a list of blocks", where)
    return content


def _piece(block: dict[str, Any], where: str) -> str | ImagePart:
    if block.get("type") != "image":
        return _text_of(block, where)
    with naming(f"{where}.source"):
        match block.get("source"):
            case {"type": "base64", **told}:
                return image_of_base64(told.get("data"))
            case {"type": "url", **told}:
                return image_at(told.get("url"))
    raise refused('must have the type "base64" or "url"', f"{where}.source")


def _text_of(block: dict[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind == "text":
        return string_in(block, "text", where)
    if not isinstance(kind, str):
        raise refused("each block needs a type, a string", f"{where}.type")
    if kind == "image":
        raise refused("only users and tools may send images", where)
    raise refused(
        f"blocks of type {kind[:50]!r} are not supported; send text, and images to models that take them",
        where,
        "unsupported_parameter",
    )


def _tools(tools: Sequence[MessagesToolBody], left_out: list[str]) -> Iterator[ToolBody]:
    """Yield the tools that the client runs.

    Tools with a type other than `custom` run at Anthropic; they are listed in `left_out`, by position and type."""
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            left_out.append(f"tools[{i}] {tool.type[:50]}")
            continue
        if tool.input_schema is None:
            raise refused("is required", f"tools[{i}].input_schema")
        function = FunctionBody(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        yield ToolBody(type="function", function=function)


def _tool_choice(choice: dict[str, Any] | None) -> tuple[ToolChoice | None, bool]:
    """Return the tool choice in OpenAI's form, and whether parallel calls are allowed."""
    if choice is None:
        return None, True
    parallel = choice.get("disable_parallel_tool_use") is not True
    match choice.get("type"):
        case "auto":
            return "auto", parallel
        case "any":
            return "required", parallel
        case "none":
            return "none", parallel
        case "tool":
            name = string_in(choice, "name", "tool_choice")
            return AllowedToolsBody(mode="required", tools=(name,)), parallel
    raise refused('must be "auto", "any", "tool" or "none"', "tool_choice.type")


def _thinking(body: MessagesBody) -> dict[str, Any]:
    """Return the chat template's variables for thinking; empty if the request does not mention it."""
    told: dict[str, Any] = {}
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise refused('must be "enabled", "disabled" or "adaptive"', "thinking.type")
        if kind != "adaptive":
            told = thinking_variables(kind == "enabled")
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        if effort not in ("low", "medium", "high", "xhigh", "max"):
            raise refused('must be "low", "medium", "high", "xhigh" or "max"', "output_config.effort")
        told["reasoning_effort"] = effort
    return told


def _constraint(body: MessagesBody) -> AnswerConstraint | None:
    where, form = "output_format", body.output_format
    if body.output_config is not None and body.output_config.get("format") is not None:
        where, form = "output_config.format", body.output_config["format"]
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise refused('must be {"type": "json_schema", "schema": {...}}', where)
    with naming(f"{where}.schema"):
        return schema_constraint(form.get("schema"))


def prompt_pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a prompt that later turns repeat, and whether each identifies a conversation.

    Clients move `cache_control` from turn to turn, so it is left out.
    """
    if system := without_billing(fields.get("system")):
        yield canonical(_without_labels(system)), False
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield canonical([message.get("role"), without_pixels(_without_labels(message.get("content")))]), True


def _without_labels(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in block.items() if name not in _LABELS} if isinstance(block, dict) else block
        for block in content
    ]


class MessagesWriter(BlockWriter):
    """Writes one answer, as a message or as the events of its stream."""

    call_prefix = "toolu_"

    def started(self, usage: Usage) -> bytes:
        message = self._message([], None, None, {**_usage(usage), "output_tokens": 0})
        return _event("message_start", message=message) + _event("ping")

    def opened(self, block: Block) -> bytes:
        return _event("content_block_start", index=len(self.blocks) - 1, content_block=_content(block, is_empty=True))

    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        delta = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def closed(self, block: Block) -> bytes:
        return _event("content_block_stop", index=len(self.blocks) - 1)

    def ended(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        delta = {"stop_reason": _stop_reason(finish_reason, stop_string), "stop_sequence": stop_string}
        return _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        content = [_content(block) for block in self.blocks]
        stop_reason = _stop_reason(finish_reason, stop_string)
        return _encoder.encode(self._message(content, stop_reason, stop_string, _usage(usage)))

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_string: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request.answer_name.nonce}", "type": "message", "role": "assistant",
            "model": self.request.requested_model, "content": content, "stop_reason": stop_reason,
            "stop_sequence": stop_string, "usage": usage,
        }  # fmt: skip


def _stop_reason(finish_reason: FinishReason, stop_string: str | None) -> str:
    return "stop_sequence" if stop_string is not None else _STOP_REASONS[finish_reason]


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage. Cached tokens are not part of the input tokens, as Anthropic counts."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
    }  # fmt: skip


def _content(block: Block, *, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else block.text
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": tool_input(text)}


def tool_input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """Return a call's arguments, with numbers of any size; {} if they are incomplete or invalid."""
    try:
        _objects.decode(arguments)
    except (ValueError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode())


def model_card(name: str, created: int) -> dict[str, Any]:
    """Return a model in the form of Anthropic's lists. `created` is in seconds since the epoch."""
    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def model_page(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return models as the only page of a list."""
    first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
    return {"data": cards, "has_more": False, "first_id": first, "last_id": last}


def _event(name: str, **fields: Any) -> bytes:
    return encode_event(_encoder.encode({"type": name, **fields}), name=name)
