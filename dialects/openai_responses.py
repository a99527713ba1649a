"""OpenAI's Responses: the request body, its translation, the answer and the events of its stream.

Source: OpenAI's reference of POST /v1/responses and of its streaming events. response_store/app.py handles the state between requests (`store`,
`previous_response_id`, `background`): a body that reaches this module contains its whole conversation.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from pilotlight.dialects.blocks import Block, BlockWriter
from pilotlight.dialects.body.answer_constraints import ANY_OBJECT, schema_constraint
from pilotlight.dialects.body.bodies import (
    MAX_LOGPROBS,
    Body,
    CallBody,
    CallFunctionBody,
    MessageBody,
    at_most,
    objects,
    read_top_p,
)
from pilotlight.dialects.body.images import Content, ImagePart, image_at, joined
from pilotlight.dialects.body.parsing import (
    Resolve,
    conversation_of,
    known_model,
    naming,
    parse_body,
    read_arguments,
    refused,
    string_in,
    thinking_variables,
)
from pilotlight.dialects.body.text_files import file_in
from pilotlight.dialects.custom_tools import InputReader, arguments_of, input_of
from pilotlight.dialects.prefix_pieces import canonical, without_billing, without_pixels
from pilotlight.dialects.requests import AnswerConstraint, Sampling, ValidGeneration
from pilotlight.dialects.responses_tools import ClientTool, ResponsesToolBody, ResponsesTools, flat_name
from pilotlight.wire.chat import MAX_ITEMS, MAX_MESSAGES, FinishReason, TokenLogprob, Usage
from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import encode_event

FINAL_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_LOGPROBS = "message.output_text.logprobs"  # a value of `include`
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_BOOKKEEPING = ("id", "status", "annotations", "logprobs")  # bookkeeping fields of an item
_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}

# Schema of an answer that is not streamed.
RESPONSE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model", "output", "usage", "tools", "tool_choice",
                 "parallel_tool_calls"],
    "properties": {
        "id": {"type": "string"}, "object": {"const": "response"}, "created_at": {"type": "integer"}, "model": {"type": "string"},
        "status": {"enum": ["completed", "incomplete", "failed", "cancelled", "queued", "in_progress"]},
        "error": {"type": ["object", "null"]}, "incomplete_details": {"type": ["object", "null"]},
        "output": {"type": "array", "items": {
            "type": "object", "required": ["id", "type"], "properties": {
                "type": {"enum": ["message", "reasoning", "function_call", "custom_tool_call"]}}}},
        "usage": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]}]},
        "tools": {"type": "array"}, "parallel_tool_calls": {"type": "boolean"},
    },
}  # fmt: skip

_encoder = msgspec.json.Encoder()


class TextBody(Body, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(Body, frozen=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input": objects(MAX_MESSAGES), "tools": at_most(MAX_ITEMS), "top_p": read_top_p}
    PARTS: ClassVar = {"tools": ResponsesToolBody, "text": TextBody, "reasoning": ReasoningBody}

    model: str | None = None  # None if the path names it
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[ResponsesToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    prompt: None = None  # at OpenAI, a stored template


class ValidResponse(ValidGeneration, frozen=True):
    told: dict[str, Any] = msgspec.field(default_factory=dict)  # fields of the request that the answer repeats
    tools: dict[str, ClientTool] = msgspec.field(default_factory=dict)  # `by_name` of ResponsesTools

    @property
    def prompt_field(self) -> str:
        return "input"


def parse_response(raw: bytes, resolve: Resolve, model: str | None = None, *, strict: bool = False) -> ValidResponse:
    """Parse a body of /v1/responses. `model` is the model in the path, if there is one. Raises ApiError."""
    body, ignored = parse_body(ResponsesBody, raw, strict)
    requested = body.model if model is None else model
    if requested is None:
        raise ApiError("invalid_request", "model is required", param="model")
    tools = ResponsesTools(body.tools or [])
    if strict and tools.left_out:
        where = tools.left_out[0].partition(" ")[0]
        raise refused("is not supported here: declare functions", where, "unsupported_parameter")
    choice = tools.choice(body.tool_choice)
    left_out: list[str] = []
    conversation = conversation_of(
        list(_messages(body, left_out)),
        [] if choice == "none" else tools.declared,
        parallel=body.parallel_tool_calls is not False,
        tool_choice=choice,
    )
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = {} if effort is None else {"reasoning_effort": effort, **thinking_variables(effort != "none")}
    if body.text is not None and body.text.verbosity is not None:
        variables["verbosity"] = body.text.verbosity
    return ValidResponse(
        model=known_model(requested, resolve),
        requested_model=requested,
        prompt=msgspec.structs.replace(conversation, variables=variables, drops_oldest=body.truncation == "auto"),
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            num_logprobs=(body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None,
        ),
        stream=bool(body.stream),
        constraint=_constraint(body.text),
        ignored=(*ignored, *tools.left_out, *left_out),
        told=_told(body),
        tools=tools.by_name,
    )


def _messages(body: ResponsesBody, left_out: list[str]) -> Iterator[MessageBody]:
    if instructions := without_billing(body.instructions):  # some proxies of Claude Code forward its billing line
        yield MessageBody(role="system", content=instructions)
    yield from messages_of(body.input, left_out)


def messages_of(given: str | list[dict[str, Any]], left_out: list[str]) -> Iterator[MessageBody]:
    """Yield the messages of an `input`.

    Adjacent items of the assistant form one turn: reasoning, text, calls. Items of another service's own tools, and items that only another service
    can read, are listed in `left_out`, by position and type."""
    if isinstance(given, str):
        yield MessageBody(role="user", content=given)
        return
    if not given:
        raise refused("must not be empty", "input")
    turn = _Turn()
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "reasoning":
            if turn.texts or turn.calls:
                yield turn.ended()
            turn.thoughts += _texts(item.get("content") or item.get("summary") or [], where, left_out)
        elif _is_foreign(kind, item):
            left_out.append(f"{where} {kind[:50]}")
        elif isinstance(kind, str) and kind.endswith("_call"):
            turn.calls.append(_call(kind, item, where))
        elif kind == "message" and role == "assistant":
            if turn.calls:
                yield turn.ended()
            turn.texts += _texts(item.get("content"), f"{where}.content", left_out)
        else:
            if turn.has_started:
                yield turn.ended()
            yield _other(kind, role, item, where, left_out)
    if turn.has_started:
        yield turn.ended()


class _Turn:
    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[CallBody] = []

    @property
    def has_started(self) -> bool:
        return bool(self.thoughts or self.texts or self.calls)

    def ended(self) -> MessageBody:
        """Return the assistant's turn so far, and start a new one."""
        message = MessageBody(
            role="assistant",
            content="".join(self.texts),
            tool_calls=self.calls or None,
            reasoning_content="".join(self.thoughts) or None,
        )
        self.thoughts, self.texts, self.calls = [], [], []
        return message


# Types of items that only the service that made them can read: its summaries, and items of its connections to MCP servers.
_FOREIGN = (
    "compaction",
    "compaction_summary",
    "context_compaction",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)


def _is_foreign(kind: Any, item: dict[str, Any]) -> bool:
    """Tell whether an item belongs to a tool of another service.

    A call without a `call_id` ran at that service; the client answers the others."""
    if kind in ("function_call", "custom_tool_call"):
        return False
    return kind in _FOREIGN or (isinstance(kind, str) and kind.endswith("_call") and "call_id" not in item)


def _other(kind: Any, role: Any, item: dict[str, Any], where: str, left_out: list[str]) -> MessageBody:
    if isinstance(kind, str) and kind.endswith("_output"):
        call_id = "id" if kind == "local_shell_call_output" and "call_id" not in item else "call_id"
        output = _output(kind, item, where, left_out)
        return MessageBody(role="tool", content=output, tool_call_id=string_in(item, call_id, where))
    if kind == "item_reference":
        raise refused(f"no item {str(item.get('id'))[:100]!r} is stored here: send the item itself", where, "not_found")
    if kind != "message":
        raise refused(f"items of type {str(kind)[:50]!r} are not supported", f"{where}.type", "unsupported_parameter")
    if role not in ("user", "system", "developer"):
        raise refused('must be "user", "assistant", "system" or "developer"', f"{where}.role")
    read = _parts if role == "user" else _texts
    return MessageBody(role=role, content=joined(read(item.get("content"), f"{where}.content", left_out)))


def _output(kind: str, item: dict[str, Any], where: str, left_out: list[str]) -> str | Content:
    if kind in ("function_call_output", "custom_tool_call_output"):
        return joined(_parts(item.get("output"), f"{where}.output", left_out))
    output = item.get("output")
    if isinstance(output, str):
        return output
    return json.dumps(_content_of(item) if output is None else output, ensure_ascii=False)


def _content_of(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item's fields without its type, ids and status."""
    return {name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status")}


def _texts(content: Any, where: str, left_out: list[str]) -> list[str]:
    pieces = _parts(content, where, left_out)
    for i, piece in enumerate(pieces):
        if not isinstance(piece, str):
            raise refused("only users and tools may send images", f"{where}[{i}]")
    return [piece for piece in pieces if isinstance(piece, str)]


def _parts(content: Any, where: str, left_out: list[str]) -> Content:
    """Return the texts and images of an item's content. PDF files are listed in `left_out`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise refused("must be a string or a list of parts", where)
    return [_part(part, f"{where}[{i}]", left_out) for i, part in enumerate(content)]


def _part(part: dict[str, Any], where: str, left_out: list[str]) -> str | ImagePart:
    kind = part.get("type")
    if (file := file_in(part)) is not None:
        left_out += [where + file.where] if file.is_pdf else []
        with naming(where):
            return file.named_text()
    if kind == "input_image":
        if part.get("image_url") is None and part.get("file_id") is not None:
            raise refused(
                "files are not stored here: send the image itself", f"{where}.file_id", "unsupported_parameter"
            )
        with naming(f"{where}.image_url"):
            return image_at(part.get("image_url"))
    if kind == "refusal":
        return string_in(part, "refusal", where)
    if kind not in _TEXTS:
        raise refused(
            f"parts of type {str(kind)[:50]!r} are not supported; send text, and images to models that take them",
            where,
            "unsupported_parameter",
        )
    return string_in(part, "text", where)


def _call(kind: str, item: dict[str, Any], where: str) -> CallBody:
    """Return a call that the client answers.

    The call is to a function, a custom tool, or a typed tool such as `local_shell_call`."""
    arguments: str | dict[str, Any]
    match kind:
        case "function_call":
            arguments = read_arguments(string_in(item, "arguments", where))
        case "custom_tool_call":
            arguments = arguments_of(string_in(item, "input", where))
        case _:
            arguments = _content_of(item)
            item = {**item, "name": kind.removesuffix("_call")}
    name = flat_name(string_in(item, "name", where), item.get("namespace"))
    return CallBody(id=string_in(item, "call_id", where), function=CallFunctionBody(name=name, arguments=arguments))


def _constraint(text: TextBody | None) -> AnswerConstraint | None:
    form = text.format if text is not None else None
    match (form or {}).get("type", "text"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            with naming("text.format.schema"):
                return schema_constraint((form or {}).get("schema"))
    raise refused('must have the type "text", "json_object" or "json_schema"', "text.format")


def _told(body: ResponsesBody) -> dict[str, Any]:
    reasoning, text = body.reasoning, body.text
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "temperature": body.temperature,
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": [_declared(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
    }


def _declared(tool: ResponsesToolBody) -> dict[str, Any]:
    """Return a tool in the form in which an answer repeats it."""
    fields: dict[str, Any] = msgspec.to_builtins(tool)
    return {name: value for name, value in fields.items() if value is not None or name not in ("format", "tools")}


def prompt_pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a prompt that later turns repeat, and whether each identifies a conversation."""
    if instructions := without_billing(fields.get("instructions")):
        yield canonical(instructions), False
    given = fields.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    for item in given if isinstance(given, list) else ():
        yield canonical(_said(item)), not (isinstance(item, dict) and item.get("role") in ("system", "developer"))


def _said(item: Any) -> Any:
    """Return an item in a form that is the same whether the client or the server wrote it."""
    if not isinstance(item, dict):
        return item
    content = item.get("content")
    if isinstance(content, list):
        content = without_pixels([part.get("text", part) if isinstance(part, dict) else part for part in content])
    kept = {name: value for name, value in item.items() if name not in (*_BOOKKEEPING, "content", "type")}
    if isinstance(item.get("output"), list):
        kept["output"] = without_pixels(item["output"])
    return {**kept, "content": [content] if isinstance(content, str) else content}


class ResponsesWriter(BlockWriter):
    """Writes one answer, as a response or as the numbered events of its stream."""

    def __init__(self, request: ValidGeneration) -> None:
        super().__init__(request)
        self._told = request.told if isinstance(request, ValidResponse) else {}
        self._tools = request.tools if isinstance(request, ValidResponse) else {}
        self._input = InputReader()  # extracts the input of the last call, if it is to a custom tool

    def started(self, usage: Usage) -> bytes:
        response = self._response("in_progress", None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> bytes:
        item = self._item(len(self.blocks) - 1, is_empty=True)
        events = self._event("response.output_item.added", output_index=len(self.blocks) - 1, item=item)
        if block.kind == "call":
            self._input = InputReader()
            return events
        return events + self._event("response.content_part.added", **self._place(0), part=_part_of(block, ""))

    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        if block.kind == "text":
            return self._event("response.output_text.delta", **self._place(0), delta=text, logprobs=logprobs)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(0), delta=text)
        if self._tool_of(block).is_custom:
            return self._event("response.custom_tool_call_input.delta", **self._place(), delta=self._input.push(text))
        return self._event("response.function_call_arguments.delta", **self._place(), delta=text)

    def closed(self, block: Block) -> bytes:
        text = block.text
        if block.kind == "text":
            events = self._event("response.output_text.done", **self._place(0), text=text, logprobs=block.logprobs)
        elif block.kind == "reasoning":
            events = self._event("response.reasoning_text.done", **self._place(0), text=text)
        elif self._tool_of(block).is_custom:
            rest = self._input.finish()
            delta = self._event("response.custom_tool_call_input.delta", **self._place(), delta=rest) if rest else b""
            events = delta + self._event(
                "response.custom_tool_call_input.done", **self._place(), input=self._input.text
            )
        else:
            name = "response.function_call_arguments.done"
            events = self._event(name, **self._place(), name=self._tool_of(block).name, arguments=text)
        if block.kind != "call":
            events += self._event("response.content_part.done", **self._place(0), part=_part_of(block, text))
        last = len(self.blocks) - 1
        return events + self._event("response.output_item.done", output_index=last, item=self._item(last))

    def ended(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        status = _status(finish_reason)
        return self._event(f"response.{status}", response=self._response(status, usage, finish_reason))

    def whole(self, usage: Usage, finish_reason: FinishReason, stop_string: str | None) -> bytes:
        return _encoder.encode(self._response(_status(finish_reason), usage, finish_reason))

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return encode_event(_encoder.encode(event), name=kind)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        """Return the fields of an event that locate the last block in the response."""
        last = len(self.blocks) - 1
        place = {"item_id": self._item_id(last), "output_index": last}
        return place if content_index is None else {**place, "content_index": content_index}

    def _item_id(self, index: int) -> str:
        block = self.blocks[index]
        is_custom = block.kind == "call" and self._tool_of(block).is_custom
        return ("ctc_" if is_custom else _ID_PREFIXES[block.kind]) + self.request.answer_name.item_id(0, index)

    def _tool_of(self, block: Block) -> ClientTool:
        """Return the tool that a block of kind "call" calls."""
        return self._tools.get(block.name) or ClientTool(block.name)

    def _item(self, index: int, *, is_empty: bool = False) -> dict[str, Any]:
        block = self.blocks[index]
        is_cut = self.is_cut and index == len(self.blocks) - 1
        status = "in_progress" if is_empty else "incomplete" if is_cut else "completed"
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        text = "" if is_empty else block.text
        if block.kind == "call":
            tool = self._tool_of(block)
            called = {**item, "call_id": block.call_id, **tool.named}
            if tool.is_custom:
                return {**called, "type": "custom_tool_call", "input": input_of(text)}
            return {**called, "type": "function_call", "arguments": text}
        content = [] if is_empty else [_part_of(block, text)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, usage: Usage | None, finish_reason: FinishReason | None) -> dict[str, Any]:
        name = self.request.answer_name
        return {
            "id": f"resp_{name.nonce}", "object": "response", "created_at": name.created, "status": status, "background": False,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if finish_reason == "length" else None,
            "model": self.request.requested_model, **self._told, "previous_response_id": None, "service_tier": "default",
            "store": False, "output": [] if usage is None else [self._item(i) for i in range(len(self.blocks))],
            "usage": None if usage is None else _usage(usage),
        }  # fmt: skip


def _status(finish_reason: FinishReason) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _part_of(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
