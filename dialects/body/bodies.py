"""The structs of the dialects' request bodies.

They check shapes only: parsing.py turns a body into a `Valid...` value, and validation_errors.py has the error messages. Types are strict: "0.5" is
not a number and true is not 1.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from pilotlight.dialects.body.images import Content, ImagePart, image_at, joined
from pilotlight.dialects.body.invalid_values import ValidationError, unsupported
from pilotlight.dialects.body.text_files import file_in
from pilotlight.wire.chat import MAX_ITEMS, MAX_MESSAGES, MAX_NESTING

MAX_STOPS = 128
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
LEAST_TOP_P = 1e-9
CUSTOM_INPUT = "input"  # the parameter of the function that represents a custom tool

TokenIds = tuple[Annotated[int, Meta(ge=0)], ...]
StopStrings = tuple[Annotated[str, Meta(min_length=1)], ...]


# A function that converts a value from any form that clients send to the declared form. Raises ValidationError.
Reader = Callable[[Any], Any]


def join_parts(value: Any) -> Any:
    """Join text parts with newlines, because many templates expect a string; keep a list that has images."""
    if not isinstance(value, list):
        if isinstance(value, str):
            return value
        raise _no_parts()
    if len(value) > MAX_ITEMS:
        raise ValidationError(f"has {len(value)} parts; send at most {MAX_ITEMS}")
    if any(isinstance(part, ImagePart) for part in value):
        return value
    return joined(_piece(part, f"[{i}]") for i, part in enumerate(value))


def _piece(part: Any, at: str) -> str | ImagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _no_parts()
    if kind == "image_url":
        url = part.get("image_url")
        return image_at(url.get("url") if isinstance(url, dict) else url)
    if (file := file_in(part)) is not None:
        if file.is_pdf:  # `known` has replaced those that are ignored
            raise ValidationError("PDF files are not read: send their text", "unsupported_parameter", at + file.where)
        return file.named_text(at)
    if kind not in ("text", "refusal"):
        raise unsupported(
            f"parts of type {kind[:50]!r} are not supported; send text, and image_url to models that take images"
        )
    if not isinstance(text := part.get(kind), str):
        raise ValidationError(f"a part of type {kind!r} needs {kind!r} as a string")
    return text


def at_most(most: int) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            raise ValidationError(f"has {len(value)} items; send at most {most}")
        return value

    return read


def objects(most: int) -> Reader:
    """Return a reader of a string, or of a list of up to `most` objects that are not nested too deep."""

    def read(value: Any) -> Any:
        at_most(most)(value)
        for position, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, dict):
                raise ValidationError(f"item {position} must be an object")
        return not_deep(value)

    return read


def not_deep(value: Any) -> Any:
    """Return the value.

    Raises ValidationError if it is nested deeper than MAX_NESTING, because deeper JSON breaks parsers here or at clients."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return value
    raise ValidationError(f"is nested more than {MAX_NESTING} deep")


def _no_parts() -> ValidationError:
    return ValidationError('must be a string or a list of parts such as {"type": "text", "text": "..."}')


def _listed_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValidationError("must be a string or a list of strings")
    stops = [stop for stop in stops if stop]  # an empty string stops nothing
    if len(stops) > MAX_STOPS:
        raise ValidationError(f"may list at most {MAX_STOPS} strings")
    return stops


def are_token_ids(value: Any) -> bool:
    try:
        return len(msgspec.convert(value, TokenIds)) > 0  # takes 0.3 ms for 100,000 ids; a loop in Python takes 4 ms
    except msgspec.ValidationError:
        return False


def read_tool_choice(value: Any) -> Any:
    """Convert tool_choice: "auto", "none" or "required", one function, or a list of allowed functions.

    Functions may be wrapped as in OpenAI's chat completions, or unwrapped."""
    if value in ("auto", "none", "required"):
        return value
    if value == "any":  # Workers AI and other APIs say "any" for "required"
        return "required"
    if (name := _function_name(value)) is not None:
        return {"mode": "required", "tools": [name]}
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools", value))
    raise ValidationError(
        'must be "auto", "none", "required", {"type": "function", "function": {"name": "..."}} or {"type": "allowed_tools", ...}'
    )


def _allowed_tools(value: Any) -> Any:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise ValidationError(
            'of type allowed_tools needs a mode, "auto" or "required", and tools, a list of functions by their names'
        )
    return {"mode": mode, "tools": names}


def _function_name(value: Any) -> str | None:
    kind = value.get("type", "function") if isinstance(value, dict) else None
    if kind not in ("function", "custom"):
        return None
    function = value.get(kind)
    name = (function if isinstance(function, dict) else value).get("name")
    return name if isinstance(name, str) and name else None


def _biases(value: Any) -> Any:
    """Convert {"token id": bias} to a dict with numeric ids. Raises ValidationError."""
    if not isinstance(value, dict):
        raise ValidationError('must be an object such as {"1234": -100}: token ids and their biases')
    if len(value) > MAX_BIASES:
        raise ValidationError(f"may name at most {MAX_BIASES} tokens")
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise ValidationError(f'{token_id[:50]!r} is no token id; the keys are token ids such as "1234"')
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValidationError(f"the bias of token {token_id} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        biases[int(token_id)] = float(bias)
    return biases


def _whole(value: Any) -> Any:
    """Convert 5.0 to 5, because some languages have only floats. Above 2^53 floats are not exact."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


def _token_limit(value: Any) -> Any:
    """Return the limit of the answer's length; None for -1.

    Clients of LM Studio and llama.cpp send -1 for no limit."""
    limit = _whole(value)
    return None if type(limit) is int and limit == -1 else limit


def _zero_is_off(value: Any) -> Any:
    """Treat 0 as absent.

    Clients of Workers AI send it for "no repetition penalty", and a factor of 0 would be meaningless."""
    return None if type(value) in (int, float) and value == 0 else value


def read_top_p(value: Any) -> Any:
    """Convert 0 to the smallest top_p, which allows only the most likely token, as at OpenAI."""
    return LEAST_TOP_P if type(value) in (int, float) and value == 0 else value


def _empty_is_absent(value: Any) -> Any:
    return None if value in ("", {}) else value


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request body, or an object in one.

    READERS convert fields with several forms, and never get null; PARTS are the fields with nested bodies."""

    READERS: ClassVar[dict[str, Reader]] = {}
    PARTS: ClassVar[dict[str, type["Body"]]] = {}

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values without harmless extra fields.
        It may change them in place. A second call changes nothing."""
        return values

    @classmethod
    def known(cls, values: dict[str, Any], ignored: list[str], where: str = "") -> dict[str, Any]:
        """Return the values without unknown fields, including those of nested bodies.

        Their names are added to `ignored`. It may change the values in place."""
        values = cls.cleaned(values)
        names = names_of(cls)
        if not values.keys() <= names:
            ignored += [f"{where}{name}" for name in values if name not in names and values[name] is not None]
            values = only(values, cls)
        for name, part in cls.PARTS.items():
            value = values.get(name)
            if isinstance(value, list) and len(value) <= MAX_MESSAGES:  # a longer list is refused later
                values[name] = [
                    part.known(item, ignored, f"{where}{name}[{i}].") if isinstance(item, dict) else item
                    for i, item in enumerate(value)
                ]
            elif isinstance(value, dict):
                values[name] = part.known(value, ignored, f"{where}{name}.")
        return values

    @classmethod
    def in_one_form(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields in place to their declared forms. A second call changes nothing.

        Raises ValidationError."""
        values = cls.cleaned(values)
        for name, read in cls.READERS.items():
            if (value := values.get(name)) is not None:
                values[name] = read(value)
        for name, part in cls.PARTS.items():
            value = values.get(name)
            if isinstance(value, list):
                values[name] = [part.in_one_form(item) if isinstance(item, dict) else item for item in value]
            elif isinstance(value, dict):
                values[name] = part.in_one_form(value)
        return values


@cache
def names_of(body: type[Body]) -> frozenset[str]:
    return frozenset(body.__struct_fields__)


class FunctionBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"parameters": not_deep}

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments of its calls must always follow `parameters`


class ToolBody(Body, frozen=True, kw_only=True):
    PARTS: ClassVar = {"function": FunctionBody}

    type: Literal["function"]
    function: FunctionBody


def _read_arguments(value: Any) -> Any:
    """Return an object or a string unchanged; encode other arguments as JSON text.

    Clients send an invalid call back with the arguments that they received."""
    return value if isinstance(value, str) else object_or_text(value)


def object_or_text(value: Any) -> Any:
    """Return an object unchanged; encode any other value as JSON text.

    An object that is nested too deep is encoded, too. Raises ValidationError."""
    try:
        if isinstance(value, dict):
            return not_deep(value)
    except ValidationError:
        pass
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return not_deep(value)


class CallFunctionBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"arguments": _read_arguments}

    name: str
    arguments: str | dict[str, Any]


class CallBody(Body, frozen=True, kw_only=True):
    PARTS: ClassVar = {"function": CallFunctionBody}

    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunctionBody
    index: int | None = None  # a field of streamed deltas, which clients send back unchanged

    @classmethod
    def echoed(cls, values: dict[str, Any]) -> dict[str, Any]:
        custom = values.get("custom")
        if values.get("type") == "custom" and isinstance(custom, dict):
            called = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input")}}
            return {**only(values, cls), "type": "function", "function": called}
        function = values if "name" in values else values.get("function")  # Workers AI's form is not wrapped
        function = only(function, CallFunctionBody) if isinstance(function, dict) else function
        return {**only(values, cls), "function": function}


class MessageBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"content": join_parts, "tool_calls": at_most(MAX_ITEMS)}
    PARTS: ClassVar = {"tool_calls": CallBody}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Content | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for `reasoning_content`
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @classmethod
    def known(cls, values: dict[str, Any], ignored: list[str], where: str = "") -> dict[str, Any]:
        values = super().known(values, ignored, where)
        if isinstance(content := values.get("content"), list):
            values["content"] = [_without_pdf(part, ignored, f"{where}content[{i}]") for i, part in enumerate(content)]
        return values

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Drop unknown fields of an assistant's message; refuse them in all other messages.

        Clients send answers back with fields that other services or their own libraries added."""
        if values.get("role") != "assistant":
            return values
        message = only(values, cls)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [CallBody.echoed(call) if isinstance(call, dict) else call for call in calls]
        return message


def _without_pdf(part: Any, ignored: list[str], where: str) -> Any:
    file = file_in(part) if isinstance(part, dict) else None
    if file is None or not file.is_pdf:
        return part
    ignored.append(where + file.where)
    return {"type": "text", "text": file.named_text()}


def only(values: dict[str, Any], body: type[Body]) -> dict[str, Any]:
    names = names_of(body)
    if values.keys() <= names:
        return values
    return {name: value for name, value in values.items() if name in names}


class StreamOptionsBody(Body, frozen=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


# Fields of SamplingBody that constrain an answer (dialects/body/answer_constraints.py).
CONSTRAINING = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex",
    "json_schema",
)  # fmt: skip


class SamplingBody(Body, frozen=True, kw_only=True):
    """Parameters of all generating endpoints. Null is the same as absent."""

    READERS: ClassVar = {
        "repetition_penalty": _zero_is_off, "logit_bias": _biases, "stop": _listed_stops, "max_tokens": _token_limit,
        "max_completion_tokens": _token_limit, "min_tokens": _whole,
        "top_k": _whole, "seed": _whole, "n": _whole, "top_p": read_top_p, "regex": _empty_is_absent, "json_schema": _empty_is_absent,
        "truncate_prompt_tokens": _whole,
    }  # fmt: skip

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0 mean no limit, as in other engines
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # this field and the next have SGLang's names
    json_schema: Any = None
    include_stop_str_in_output: bool | None = None  # this field and the next two have vLLM's names
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1 for as many tokens as the model allows
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


class StreamingBody(SamplingBody, frozen=True, kw_only=True):
    """Parameters of OpenAI's two older endpoints."""

    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptionsBody | None = None


LISTS: dict[str, Reader] = {"messages": at_most(MAX_MESSAGES), "tools": at_most(MAX_ITEMS)}


class AllowedToolsBody(Body, frozen=True, kw_only=True):
    """The tools that may be called, by name, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: tuple[str, ...]


ToolChoice = Literal["auto", "none", "required"] | AllowedToolsBody
