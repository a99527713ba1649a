"""A raw body goes in, a `Valid...` value comes out, and nothing behind it checks again.

Every mistake becomes an ApiError that names the parameter and says what to change. Which models exist is asked of a `resolve` function; the
module refuses to know tokens: whether a prompt fits its model is found out where it is tokenised.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace

from engine.protocol import Constraint
from runtime.further_parameters import HARMLESS, UNSUPPORTED
from runtime.requests import (
    CONSTRAINING,
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    MessageBody,
    NamedToolBody,
    RunBody,
    RunEmbeddingBody,
    SamplingBody,
    ToolBody,
    ToolChoice,
    ValidationError,
    not_deep,
)
from wire.continuation import NOTHING_DELIVERED, AnswerName, Delivered, Delivery
from wire.errors import ApiError

INLINE_BYTES = (
    16 << 10
)  # of a body: what is in it is worked on at once, in milliseconds at worst, and what is in a longer one in a thread
# What a template reads besides a request's own variables.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})
Resolve = Callable[[str], str | None]  # a name or alias -> the site's own name of the model


class Conversation(Struct, frozen=True):
    """Messages and tools as chat templates expect them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    variables: dict[str, Any] = {}  # further ones that the template may read
    adds_generation_prompt: bool = True  # what begins the assistant's turn
    continues_last: bool = False  # the answer goes on with the last message, which its prompt leaves open
    must_call: bool = False  # some tool
    only_tool: str | None = None  # that may be called; None: any
    strict_tools: frozenset[str] = frozenset()  # whose arguments follow their schemas, whoever decides to call


class Sampling(Struct, frozen=True):
    """Sampling parameters; None: as the model's own defaults say."""

    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None  # None: as the answer's name says
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    num_logprobs: int | None  # of each token of the answer; None: none


Prompt = Conversation | str | tuple[int, ...]


class ValidGeneration(Struct, frozen=True):
    """A request of any generating endpoint. `model` is the site's own name, `requested_model` what the client called it, `n` how many
    answers it wants to each of its prompts."""

    model: str
    requested_model: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    n: int = 1
    constraint: Constraint | None = None
    ignored: tuple[str, ...] = ()  # fields of its body that mean nothing here
    num_bytes: int = 0  # of its body
    num_prompt_logprobs: int | None = None  # alternatives in the table of the prompt's tokens; None: no table
    # Of a request that a router sent, that router's choice: so another site can go on with the same answer.
    answer_name: AnswerName = msgspec.field(default_factory=AnswerName.fresh)
    delivery: Delivery = NOTHING_DELIVERED  # what the client has of the answer already, from another site
    prefixes: tuple[
        tuple[int, int], ...
    ] = ()  # digests by which the router knows the prompt's beginnings, longest first

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt,)

    @property
    def num_choices(self) -> int:
        """The number of answers: `n` to each prompt in turn."""
        return self.n * len(self.prompts)

    def delivered(self, choice: int) -> Delivered:
        return self.delivery.choices[choice] if choice < len(self.delivery.choices) else Delivered()

    @property
    def num_prompt_alternatives(self) -> int | None:
        """The number of alternatives that the engine reports of each prompt token; None: no table."""
        return self.num_prompt_logprobs

    @property
    def wants_prompt_only(self) -> bool:
        return False


class ValidChat(ValidGeneration, frozen=True):
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    return_token_ids: bool = False


class ValidCompletion(ValidGeneration, frozen=True):
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    return_token_ids: bool = False
    echo: bool = False
    further_prompts: tuple[str | tuple[int, ...], ...] = ()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt, *self.further_prompts)

    @property
    def num_prompt_alternatives(self) -> int | None:
        echoed = self.sampling.num_logprobs if self.echo else None
        if echoed is None or self.num_prompt_logprobs is None:
            return self.num_prompt_logprobs if echoed is None else echoed
        return max(echoed, self.num_prompt_logprobs)

    @property
    def wants_prompt_only(self) -> bool:
        return self.sampling.max_tokens == 0


class ValidRun(ValidGeneration, frozen=True):
    pass


EmbeddingInput = str | tuple[int, ...]


class ValidEmbedding(Struct, frozen=True):
    model: str
    requested_model: str
    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None  # None: all
    as_base64: bool = False
    pooling: Literal["mean", "cls"] | None = None  # None: as the model was made for
    field: str = "input"  # the request's name for its texts
    ignored: tuple[str, ...] = ()

    def where(self, position: int) -> str:
        """Return a client's name for one of its texts."""
        return self.field if len(self.inputs) == 1 else f"{self.field}[{position}]"


def parse_chat(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidChat:
    """`strict`, here and below: unknown fields are refused. Else they are named in `ignored`. Raises ApiError."""
    body, ignored = _parse(ChatBody, raw, strict)
    tools = body.tools if body.tool_choice != "none" else None
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("invalid_request", "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return ValidChat(
        model=_known(body.model, resolve),
        requested_model=body.model,
        prompt=replace(
            _conversation(
                body.messages, tools, parallel=body.parallel_tool_calls is not False, tool_choice=body.tool_choice
            ),
            **_template_options(body),
        ),
        sampling=_sampling(body, max_tokens, num_logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        stream=bool(body.stream),
        n=body.n or 1,
        ignored=ignored,
        num_prompt_logprobs=_num_prompt_logprobs(body),
        include_usage=_include_usage(body),
        constraint=_constraint(body),
        usage_in_every_chunk=_usage_in_every_chunk(body),
        return_token_ids=bool(body.return_token_ids),
    )


def _template_options(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if taken := variables.keys() & TEMPLATE_NAMES:
        message = f"chat_template_kwargs: {min(taken)!r} has a parameter of its own, or none"
        raise ApiError("invalid_request", message, param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"  # as the templates of Qwen and GLM ask, and those of DeepSeek and Kimi
        told = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        variables = {**told, **variables}
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ApiError("invalid_request", message, param="continue_final_message")
    if continues and body.messages[-1].role != "assistant":
        message = "continue_final_message needs an assistant's message at the end of messages"
        raise ApiError("invalid_request", message, param="continue_final_message")
    adds = body.add_generation_prompt is not False and not continues
    return {"variables": variables, "adds_generation_prompt": adds, "continues_last": continues}


def parse_completion(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidCompletion:
    body, ignored = _parse(CompletionBody, raw, strict)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("invalid_request", "max_tokens: must be at least 1, or echo true", param="max_tokens")
    return ValidCompletion(
        model=_known(body.model, resolve),
        requested_model=body.model,
        prompt=body.prompt[0],
        further_prompts=body.prompt[1:],
        sampling=_sampling(body, body.max_tokens, num_logprobs=body.logprobs),
        stream=bool(body.stream),
        n=body.n or 1,
        ignored=ignored,
        num_prompt_logprobs=_num_prompt_logprobs(body),
        include_usage=_include_usage(body),
        usage_in_every_chunk=_usage_in_every_chunk(body),
        return_token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        constraint=_constraint(body),
    )


def parse_run(raw: bytes, resolve: Resolve, model: str, *, strict: bool = False) -> ValidRun:
    known = _known(model, resolve)
    body, ignored = _parse(RunBody, raw, strict)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("invalid_request", "give either prompt or messages", param="prompt")
    prompt: Prompt
    tools = body.tools if body.tool_choice != "none" else None
    if body.messages is not None:
        prompt = _conversation(body.messages, tools, tool_choice=body.tool_choice)
    elif body.raw and body.prompt is not None:
        prompt = body.prompt
    else:
        said = MessageBody(role="user", content=body.prompt)
        prompt = _conversation([said], tools, tool_choice=body.tool_choice)
    sampling = _sampling(body, body.max_tokens, num_logprobs=None)
    constraint = _constraint(body)
    return ValidRun(known, model, prompt, sampling, bool(body.stream), constraint=constraint, ignored=ignored)


def parse_embedding(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidEmbedding:
    body, ignored = _parse(EmbeddingBody, raw, strict)
    return ValidEmbedding(
        model=_known(body.model, resolve),
        requested_model=body.model,
        inputs=body.input,
        dimensions=body.dimensions,
        as_base64=body.encoding_format == "base64",
        ignored=ignored,
    )


def parse_run_embedding(raw: bytes, resolve: Resolve, model: str, *, strict: bool = False) -> ValidEmbedding:
    known = _known(model, resolve)
    body, ignored = _parse(RunEmbeddingBody, raw, strict)
    return ValidEmbedding(known, model, body.text, pooling=body.pooling, field="text", ignored=ignored)


BodyT = TypeVar("BodyT", bound=Body)


def _parse(body: type[BodyT], raw: bytes, strict: bool) -> tuple[BodyT, tuple[str, ...]]:
    """Return the body, and the names of unknown fields, which are left out."""
    ignored: list[str] = []
    values = _asked(raw, body, None if strict else ignored)
    try:
        return msgspec.convert(body.in_one_form(values), body), tuple(ignored)
    except msgspec.ValidationError as error:
        from runtime.validation_errors import first_error

        raise first_error(_asked(raw, body, None if strict else ignored), body) or error from None


def _asked(raw: bytes, body: type[Body], ignored: list[str] | None) -> dict[str, Any]:
    """Return the parameters that ask for something: null is absent, harmless parameters and neutral values of refused ones ask for nothing. Unknown
    fields are named in `ignored`, and refused where it is None."""
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError("invalid_request", "the body must be a JSON object")
    names = body.names()
    if not values.keys() <= names:
        for name in values:
            if name not in names:
                _leave_out(name, values[name], names, ignored)
    values = {name: value for name, value in values.items() if value is not None and name in names}
    return values if ignored is None else body.known(values, ignored)


def _leave_out(name: str, value: Any, names: frozenset[str], ignored: list[str] | None) -> None:
    if name in UNSUPPORTED:
        refused = UNSUPPORTED[name]
        if value is not None and not any(type(value) is type(n) and value == n for n in _widened(refused.neutral)):
            message = f"{name} is not supported with this value: {refused.instead}"
            raise ApiError("unsupported_parameter", message, param=name)
    elif name not in HARMLESS and ignored is not None:
        ignored += [name] if value is not None else ()
    elif name not in HARMLESS:
        from runtime.validation_errors import unknown_parameter

        raise unknown_parameter(name, names | HARMLESS)


def _widened(neutral: Iterable[Any]) -> list[Any]:
    """Add 0.0 for 0, and so on."""
    return [*neutral, *(float(value) for value in neutral if type(value) is int)]


def _known(name: str, resolve: Resolve) -> str:
    known = resolve(name)
    if known is None:
        raise ApiError(
            "model_not_found", f"this site has no model named {name[:200]!r}; see /ai/v1/models", param="model"
        )
    return known


def _include_usage(body: ChatBody | CompletionBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError("invalid_request", "stream_options needs stream: true", param="stream_options")
    return body.stream_options.include_usage


def _usage_in_every_chunk(body: ChatBody | CompletionBody) -> bool:
    return _include_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)


def _num_prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("invalid_request", "prompt_logprobs needs stream: false", param="prompt_logprobs")
    return body.prompt_logprobs


def _constraint(body: SamplingBody) -> Constraint | None:
    if all(getattr(body, name) is None for name in CONSTRAINING):
        return None
    from runtime.constraints import constraint_of

    return constraint_of(body)


def _sampling(body: SamplingBody, max_tokens: int | None, num_logprobs: int | None) -> Sampling:
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
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
    )


def _conversation(
    messages: list[MessageBody],
    tools: Sequence[ToolBody] | None,
    *,
    parallel: bool = True,
    tool_choice: ToolChoice | None = None,
) -> Conversation:
    names = [tool.function.name for tool in tools or ()]
    only = tool_choice.name if isinstance(tool_choice, NamedToolBody) else None
    must_call = only is not None or tool_choice == "required"
    if must_call and not names:
        raise ApiError("invalid_request", "tool_choice: there are no tools to choose from", param="tool_choice")
    if only is not None and only not in names:
        raise ApiError("invalid_request", f"tool_choice: there is no tool named {only[:100]!r}", param="tool_choice")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError("invalid_request", f"tools: two are named {twice[:100]!r}", param="tools")
    return Conversation(
        tuple(_message(message, f"messages[{position}]") for position, message in enumerate(messages)),
        tuple(_tool(tool) for tool in tools or ()),
        parallel,
        must_call=must_call,
        only_tool=only,
        strict_tools=frozenset(tool.function.name for tool in tools or () if tool.function.strict),
    )


def _tool(tool: ToolBody) -> dict[str, Any]:
    named = ((name, getattr(tool.function, name)) for name in ("name", "description", "parameters"))
    return {"type": tool.type, "function": {name: value for name, value in named if value is not None}}


def _message(message: MessageBody, where: str) -> dict[str, Any]:
    """Return a message as templates expect it: the developer is the system, arguments are objects, and what is absent is left out."""
    role = "system" if message.role == "developer" else message.role
    content = message.content if message.content is not None else message.refusal
    if content is None and not (role == "assistant" and message.tool_calls):
        raise ApiError(
            "invalid_request", f"{where}.content is required for the role {role!r}", param=f"{where}.content"
        )
    if message.tool_calls and role != "assistant":
        field = f"{where}.tool_calls"
        raise ApiError("invalid_request", f"{field}: only the assistant calls tools", param=field)
    rendered: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls[{i}]")
                                  for i, call in enumerate(message.tool_calls)]  # fmt: skip
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    further = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    if not (message.tool_calls and content):  # that of gpt-oss calls it so, and writes one of the two before calls
        further["thinking"] = reasoning
    rendered |= {name: value for name, value in further.items() if value is not None}
    return rendered


def _call(call_id: str | None, name: str, arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        field = f"{where}.function.arguments"
        try:
            arguments = not_deep(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            raise ApiError("invalid_request", f"{field} must be a JSON object, as text", param=field) from None
        except ValidationError as error:
            raise ApiError("invalid_request", f"{field}: {error}", param=field) from None
        if not isinstance(arguments, dict):
            raise ApiError("invalid_request", f"{field} must be a JSON object, as text", param=field)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}
