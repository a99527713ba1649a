"""OpenAI's chat completions: the request body and its translation to a generation request."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import replace

from pilotlight.dialects.body.bodies import (
    LISTS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    Body,
    FunctionBody,
    MessageBody,
    SamplingBody,
    StreamingBody,
    StreamOptionsBody,
    ToolBody,
    ToolChoice,
    not_deep,
    read_tool_choice,
)
from pilotlight.dialects.body.parsing import (
    Resolve,
    constraint_in,
    conversation_of,
    include_usage,
    known_model,
    naming,
    num_prompt_logprobs,
    parse_body,
    prompt_options,
    sampling_of,
    thinking_variables,
)
from pilotlight.dialects.custom_tools import function_of
from pilotlight.dialects.requests import ValidGeneration
from pilotlight.wire.errors import ApiError

# Template variables that a request cannot set.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})


class CustomToolBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"format": not_deep}

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatToolBody(Body, frozen=True, kw_only=True):
    PARTS: ClassVar = {"function": FunctionBody, "custom": CustomToolBody}

    type: Literal["function", "custom"]
    function: FunctionBody | None = None
    custom: CustomToolBody | None = None

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool in the form of Responses, whose fields are beside its type."""
        kind = values.get("type")
        if kind in ("function", "custom") and kind not in values and "name" in values:
            return {"type": kind, kind: {name: value for name, value in values.items() if name != "type"}}
        return values


class ChatBody(StreamingBody, frozen=True, kw_only=True):
    READERS: ClassVar = {
        **SamplingBody.READERS, **LISTS, "tool_choice": read_tool_choice, "chat_template_kwargs": not_deep
    }  # fmt: skip
    PARTS: ClassVar = {"messages": MessageBody, "tools": ChatToolBody, "stream_options": StreamOptionsBody}

    model: str
    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[ChatToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_ids: bool | None = None


class ValidChat(ValidGeneration, frozen=True):
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    return_token_ids: bool = False
    custom_tools: frozenset[str] = frozenset()  # names of tools whose input is free text


def parse_chat(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidChat:
    """Parse a body.

    With `strict`, refuse unknown fields; otherwise list them in `ignored`. Raises ApiError."""
    body, ignored = parse_body(ChatBody, raw, strict)
    not_enforced: list[str] = []
    tools = [_tool(tool, f"tools[{i}]", not_enforced) for i, tool in enumerate(body.tools or ())]
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("invalid_request", "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return ValidChat(
        model=known_model(body.model, resolve),
        requested_model=body.model,
        prompt=replace(
            conversation_of(
                body.messages,
                tools if body.tool_choice != "none" else None,
                parallel=body.parallel_tool_calls is not False,
                tool_choice=body.tool_choice,
            ),
            **_template_options(body),
        ),
        sampling=sampling_of(body, max_tokens, num_logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        stream=bool(body.stream),
        n=body.n or 1,
        ignored=(*ignored, *not_enforced),
        custom_tools=frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None),
        num_prompt_logprobs=num_prompt_logprobs(body),
        include_usage=include_usage(body),
        constraint=constraint_in(body),
        **prompt_options(body),
        usage_in_every_chunk=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
    )


def _tool(tool: ChatToolBody, where: str, not_enforced: list[str]) -> ToolBody:
    """Return a tool as a function.

    If a custom tool's format cannot be enforced, the path of the field is added to `not_enforced`.
    """
    declared = tool.function if tool.type == "function" else tool.custom
    if declared is None:
        field = f"{where}.{tool.type}"
        raise ApiError("invalid_request", f"{field} is required", param=field)
    if isinstance(declared, FunctionBody):
        return ToolBody(type="function", function=declared)
    form = declared.format or {}
    flat = {**form, **inner} if isinstance(inner := form.get("grammar"), dict) else declared.format
    with naming(f"{where}.custom.format"):
        function, is_enforced = function_of(declared.name, declared.description, flat)
    if not is_enforced:
        not_enforced.append(f"{where}.custom.format")
    return ToolBody(type="function", function=function)


def _template_options(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if taken := variables.keys() & TEMPLATE_NAMES:
        message = f"chat_template_kwargs: {min(taken)!r} cannot be set here: the template gets it from the request's other parameters"
        raise ApiError("invalid_request", message, param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        told = {"reasoning_effort": body.reasoning_effort, **thinking_variables(body.reasoning_effort != "none")}
        variables = {**told, **variables}
    if body.verbosity is not None:
        variables = {"verbosity": body.verbosity, **variables}
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ApiError("invalid_request", message, param="continue_final_message")
    if continues and body.messages[-1].role != "assistant":
        message = "continue_final_message needs an assistant's message at the end of messages"
        raise ApiError("invalid_request", message, param="continue_final_message")
    adds = body.add_generation_prompt is not False and not continues
    return {"variables": variables, "adds_generation_prompt": adds, "continues_last": continues}
