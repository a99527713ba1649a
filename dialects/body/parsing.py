"""Parsing that the dialects share: raw bodies to structs, and structs to common values.

Every error is an ApiError that names the parameter and the correction. A `resolve` function looks up models. This module is independent of tokens:
the length of a prompt is checked after tokenisation.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import orjson

from pilotlight.dialects.body.bodies import (
    CONSTRAINING,
    AllowedToolsBody,
    Body,
    MessageBody,
    SamplingBody,
    StreamingBody,
    ToolBody,
    ToolChoice,
    names_of,
    not_deep,
)
from pilotlight.dialects.body.exact_json import body_values, refuse_inexact_fields
from pilotlight.dialects.body.further_parameters import HARMLESS, UNSUPPORTED
from pilotlight.dialects.body.images import ROLES, Content, ImagePart
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.requests import AnswerConstraint, Conversation, Sampling
from pilotlight.wire.errors import ApiError

Resolve = Callable[[str], str | None]  # maps a name or alias to the site's name of the model; None if it is unknown
BodyT = TypeVar("BodyT", bound=Body)


def parse_body(body: type[BodyT], raw: bytes, strict: bool) -> tuple[BodyT, tuple[str, ...]]:
    """Return the body without its unknown fields, and the names of these fields. Raises ApiError."""
    ignored: list[str] = []
    values = _asked(raw, body, None if strict else ignored)
    try:
        found = msgspec.convert(body.in_one_form(values), body)
    except msgspec.ValidationError as error:
        from pilotlight.dialects.body.validation_errors import first_error

        raise first_error(_asked(raw, body, None if strict else ignored), body) or error from None
    refuse_inexact_fields(raw)  # after `convert`, whose errors name the field
    return found, tuple(ignored)


def _asked(raw: bytes, body: type[Body], ignored: list[str] | None) -> dict[str, Any]:
    """Return the parameters that have an effect, without nulls, harmless parameters and neutral values.

    Names of unknown fields are appended to `ignored`; they are refused if `ignored` is None."""
    try:
        values = body_values(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError("invalid_request", "the body must be a JSON object")
    names, values = names_of(body), body.cleaned(values)
    if not values.keys() <= names:
        for name in values:
            if name not in names:
                _leave_out(name, values[name], names, ignored)
    values = {name: value for name, value in values.items() if value is not None and name in names}
    return values if ignored is None else body.known(values, ignored)


def _leave_out(name: str, value: Any, names: frozenset[str], ignored: list[str] | None) -> None:
    if name in UNSUPPORTED:
        found = UNSUPPORTED[name]
        if value is not None and not any(type(value) is type(n) and value == n for n in _widened(found.neutral)):
            message = f"{name} is not supported with this value: {found.instead}"
            raise ApiError("unsupported_parameter", message, param=name)
    elif name not in HARMLESS and ignored is not None:
        ignored += [name] if value is not None else ()
    elif name not in HARMLESS:
        from pilotlight.dialects.body.validation_errors import unknown_parameter

        raise unknown_parameter(name, names | HARMLESS)


def _widened(neutral: Iterable[Any]) -> list[Any]:
    """Return the neutral values and, for each integer among them, the equal float."""
    return [*neutral, *(float(value) for value in neutral if type(value) is int)]


def known_model(name: str, resolve: Resolve) -> str:
    known = resolve(name)
    if known is None:
        raise ApiError("model_not_found", f"this site has no model named {name[:200]!r}; see /v1/models", param="model")
    return known


def include_usage(body: StreamingBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError("invalid_request", "stream_options needs stream: true", param="stream_options")
    return body.stream_options.include_usage


def num_prompt_logprobs(body: StreamingBody) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("invalid_request", "prompt_logprobs needs stream: false", param="prompt_logprobs")
    return body.prompt_logprobs


def constraint_in(body: SamplingBody) -> AnswerConstraint | None:
    if all(getattr(body, name) is None for name in CONSTRAINING):
        return None
    from pilotlight.dialects.body.answer_constraints import constraint_of

    return constraint_of(body)


def sampling_of(body: SamplingBody, max_tokens: int | None, num_logprobs: int | None) -> Sampling:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        message = f"min_tokens is {body.min_tokens}, more than the {max_tokens} that the answer may have"
        raise ApiError("invalid_request", message, param="min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % 2**63,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((body.logit_bias or {}).items()),
        stop=tuple(body.stop or ()),
        shows_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
    )


def prompt_options(body: SamplingBody) -> dict[str, Any]:
    """Return a ValidGeneration's fields for the prompt: cache salt and truncation. Raises ApiError."""
    most = body.truncate_prompt_tokens
    if most == 0:
        raise ApiError(
            "invalid_request", "truncate_prompt_tokens: must be at least 1, or -1", param="truncate_prompt_tokens"
        )
    return {"cache_salt": body.cache_salt or "", "most_prompt_tokens": most}


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """Return the variables with which chat templates turn reasoning on or off."""
    # The templates of Qwen, GLM, DeepSeek and Kimi read the first two, MiniMax-M3's the third, and Seed-OSS's the last.
    variables = {"enable_thinking": thinks, "thinking": thinks, "thinking_mode": "enabled" if thinks else "disabled"}
    return variables if thinks else {**variables, "thinking_budget": 0}


def conversation_of(
    messages: list[MessageBody],
    tools: Sequence[ToolBody] | None,
    *,
    parallel: bool = True,
    tool_choice: ToolChoice | None = None,
) -> Conversation:
    names = [tool.function.name for tool in tools or ()]
    choice = tool_choice if isinstance(tool_choice, AllowedToolsBody) else None
    must_call = (tool_choice if choice is None else choice.mode) == "required"
    allowed = frozenset(names if choice is None else choice.tools)
    if (must_call or allowed) and not names:
        raise ApiError("invalid_request", "tool_choice: there are no tools to choose from", param="tool_choice")
    if unknown := allowed.difference(names):
        message = f"tool_choice: there is no tool named {min(unknown)[:100]!r}"
        raise ApiError("invalid_request", message, param="tool_choice")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError("invalid_request", f"tools: two are named {twice[:100]!r}", param="tools")
    return Conversation(
        tuple(_message(message, f"messages[{position}]") for position, message in enumerate(messages)),
        tuple(_tool(tool) for tool in tools or ()),
        parallel,
        images=tuple(
            piece
            for message in messages
            if isinstance(message.content, list)
            for piece in message.content
            if isinstance(piece, ImagePart)
        ),
        must_call=must_call,
        allowed_tools=allowed if len(allowed) < len(names) else None,
        strict_tools=frozenset(tool.function.name for tool in tools or () if tool.function.strict),
    )


def _tool(tool: ToolBody) -> dict[str, Any]:
    named = ((name, getattr(tool.function, name)) for name in ("name", "description", "parameters"))
    return {"type": tool.type, "function": {name: value for name, value in named if value is not None}}


def _message(message: MessageBody, where: str) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    The developer's role becomes `system`, arguments become objects, and absent fields are left out."""
    role = "system" if message.role == "developer" else message.role
    content = message.content if message.content is not None else message.refusal
    if content is None and role != "assistant":  # an answer may have reached its maximum length before any text
        raise ApiError(
            "invalid_request", f"{where}.content is required for the role {role!r}", param=f"{where}.content"
        )
    if message.tool_calls and role != "assistant":
        field = f"{where}.tool_calls"
        raise ApiError("invalid_request", f"{field}: only the assistant calls tools", param=field)
    if isinstance(content, list) and role not in ROLES:
        field = f"{where}.content"
        raise ApiError("invalid_request", f"{field}: a message of the role {role!r} has no images", param=field)
    rendered: dict[str, Any] = {"role": role, "content": _content(content or "")}
    if message.tool_calls:
        called = ((call.id, call.function) for call in message.tool_calls)
        rendered["tool_calls"] = [_call(id, function.name, function.arguments) for id, function in called]
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    further = {"name": message.name, "tool_call_id": message.tool_call_id}
    further |= {"reasoning_content": reasoning, "reasoning": reasoning}  # Solar Open's template reads only the second
    # gpt-oss's template reads reasoning from `thinking`, and accepts only one of text and reasoning before calls.
    if not (message.tool_calls and content):
        further["thinking"] = reasoning
    rendered |= {name: value for name, value in further.items() if value is not None}
    return rendered


def _content(content: str | Content) -> str | list[dict[str, str]]:
    """Return the content as the reference implementation passes it to a template.

    It is a string, or a list of texts and images; templates do not see pixels."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"} for piece in content]


def _call(call_id: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def read_arguments(text: str) -> str | dict[str, Any]:
    """Parse a call's arguments.

    They stay text if they are not a JSON object, as in a call cut by the length limit, or if they are nested too deep."""
    try:
        arguments = not_deep(json.loads(text or "{}"))
    except (ValueError, RecursionError, ValidationError):
        return text
    return arguments if isinstance(arguments, dict) else text


def refused(sentence: str, param: str, word: str = "invalid_request") -> ApiError:
    """Return the ApiError for a part of a body; its message begins with the part's name `param`."""
    return ApiError(word, f"{param}: {sentence}", param=param)


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Turn a ValidationError of the work inside into the ApiError for the part `param` of the body."""
    try:
        yield
    except ValidationError as error:
        raise refused(str(error), param + error.where, error.word) from None


def string_in(part: dict[str, Any], name: str, where: str) -> str:
    """Return the field `name` of a part of a body. Raises ApiError if it is no string."""
    if not isinstance(value := part.get(name), str):
        raise refused("must be a string", f"{where}.{name}")
    return value
