"""The request bodies of every endpoint as pydantic models, and which of the world's parameters are known, harmless or refused.

Shapes only: turning one into a `Valid...` value is validation's business. Strict types: "0.5" is not a number and true is not 1.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_INPUTS = 2048  # of one request for embeddings, as OpenAI has it


def _mistake(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("pilotlight", "{sentence}", {"sentence": sentence})


def _unsupported(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{sentence}", {"sentence": sentence})


def _join_parts(value: Any) -> Any:
    """A list of text parts as one text, joined by line ends, as other engines do for templates that expect text."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise _mistake('must be a string or a list of parts such as {"type": "text", "text": "..."}')
        if kind not in ("text", "refusal"):
            raise _unsupported(f"parts of type {kind!r} are not supported by this model; send text parts")
        if not isinstance(part.get(kind), str):
            raise _mistake(f"a part of type {kind!r} needs {kind!r} as a string")
        texts.append(part[kind])
    return "\n".join(texts)


def _listed_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _mistake("must be a non-empty string or a list of them")
    if len(stops) > MAX_STOPS:
        raise _mistake(f"may list at most {MAX_STOPS} strings")
    return stops


def _one_prompt(value: Any) -> Any:
    """A text, a list of token ids, or a list that holds exactly one of either."""
    if isinstance(value, list) and value and not all(type(item) is int for item in value):
        if len(value) > 1 and all(isinstance(item, str | list) for item in value):
            raise _unsupported("several prompts in one request are not supported; send one request per prompt")
        value = value[0] if len(value) == 1 else None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise _mistake("must be a text or a non-empty list of token ids (whole numbers)")


def _inputs(value: Any) -> Any:
    """A text, token ids, or a list of either, as a list of texts and lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _mistake("must be a text, a list of texts, a list of token ids or a list of such lists; not empty")
    if len(value) > MAX_INPUTS:
        raise _mistake(f"has {len(value)} texts; send at most {MAX_INPUTS} in one request")
    for position, item in enumerate(value):
        if item in ("", []):
            raise _mistake(f"text {position} is empty; leave it out")
        if not isinstance(item, str) and not (
            isinstance(item, list) and all(type(token_id) is int and token_id >= 0 for token_id in item)
        ):
            raise _mistake(f"text {position} is neither a text nor a list of token ids (whole numbers)")
    return value


def _tool_choice(value: Any) -> Any:
    if value in ("auto", "none"):
        return value
    if value == "required" or isinstance(value, dict):
        raise _unsupported('only "auto" and "none" are supported so far: the model decides whether to call')
    raise _mistake('must be "auto" or "none"')


def _biases(value: Any) -> Any:
    """{"token id": bias} with the ids as numbers."""
    if not isinstance(value, dict):
        raise _mistake('must be an object such as {"1234": -100}: token ids and their biases')
    if len(value) > MAX_BIASES:
        raise _mistake(f"may name at most {MAX_BIASES} tokens")
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise _mistake(f'{token_id[:50]!r} is no token id; the keys are token ids such as "1234"')
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _mistake(f"the bias of token {token_id} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        biases[int(token_id)] = float(bias)
    return biases


def _zero_is_off(value: Any) -> Any:
    """Clients of Workers AI send 0 where they want no repetition penalty; a factor of 0 would mean nothing."""
    return None if type(value) in (int, float) and value == 0 else value


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class FunctionBody(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # true would promise arguments that always match the schema


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class CallFunctionBody(Body):
    name: str
    arguments: str | dict[str, Any]


class CallBody(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunctionBody
    index: int | None = None  # clients send streamed deltas back as they came


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


def _without_echoes(value: Any) -> Any:
    """Clients send answers back as they got them, with fields of other services and of their own helpers: those are not the author's
    mistakes. In what an author writes, an unknown field is refused."""
    if not isinstance(value, dict) or value.get("role") != "assistant":
        return value
    message = _only(value, MessageBody)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call_without_echoes(call) if isinstance(call, dict) else call for call in calls]
    return message


def _call_without_echoes(value: dict[str, Any]) -> dict[str, Any]:
    call = _only(value, CallBody)
    if isinstance(function := call.get("function"), dict):
        call["function"] = _only(function, CallFunctionBody)
    return call


def _only(value: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name in model.model_fields}


EchoedMessageBody = Annotated[MessageBody, BeforeValidator(_without_echoes)]


class StreamOptionsBody(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(Body):
    """What every generating endpoint takes. Null is the same as absent."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=5)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: no limit, as other engines have it
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: Annotated[float | None, BeforeValidator(_zero_is_off)] = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_biases)] = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed_stops)] = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None


class ChatBody(SamplingBody):
    model: str
    messages: list[EchoedMessageBody] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptionsBody | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Annotated[str | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SamplingBody):
    model: str
    max_tokens: int | None = Field(None, ge=0)  # 0: the prompt alone, with echo
    echo: bool | None = None
    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptionsBody | None = None


class RunToolBody(Body):
    """Workers AI's own form: the function without OpenAI's wrapping."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _run_tool(value: Any) -> Any:
    """Either form of a tool, in OpenAI's wrapping."""
    if isinstance(value, dict) and "type" not in value and "function" not in value:
        return {"type": "function", "function": value}
    return value


class RunBody(SamplingBody):
    """Inputs of a text model at /ai/run: a prompt or messages."""

    prompt: str | None = Field(None, min_length=1)
    messages: list[EchoedMessageBody] | None = Field(None, min_length=1)
    raw: bool | None = None
    tools: list[Annotated[ToolBody, BeforeValidator(_run_tool)]] | None = None


class EmbeddingBody(Body):
    model: str
    input: Annotated[list[str | list[int]], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


class RunEmbeddingBody(Body):
    """Inputs of an embedding model at /ai/run."""

    text: Annotated[list[str | list[int]], BeforeValidator(_inputs)]
    pooling: Literal["mean", "cls"] | None = None


class Refused(NamedTuple):
    """A parameter that others support and we do not yet: which values of it ask for nothing, and what to do instead."""

    neutral: tuple[Any, ...]
    instead: str


_TEXT_FORMAT = {"type": "text"}

REFUSED: dict[str, Refused] = {
    "n": Refused((1,), "one answer per request is supported here; send several requests"),
    "best_of": Refused((1,), "answers are not ranked; ask for n and choose among them"),
    "echo": Refused((False,), "only the continuation is returned; /ai/v1/completions echoes"),
    "suffix": Refused(("",), "inserting before a suffix is not supported"),
    "response_format": Refused((_TEXT_FORMAT,), 'only {"type": "text"} is supported so far'),
    "json_schema": Refused((), "answers are not constrained to a schema yet"),
    "guided_json": Refused((), "answers are not constrained to a schema yet"),
    "modalities": Refused((["text"],), 'only ["text"] is supported'),
    "audio": Refused((), "audio is not supported"),
    "image": Refused((), "images are not supported"),
    "prediction": Refused((), "predicted outputs are not supported"),
    "functions": Refused(([],), "use tools"),
    "function_call": Refused(("none",), "use tools and tool_choice"),
    "reasoning_effort": Refused(("none",), "the models here do not reason before answering"),
    "verbosity": Refused(("medium",), "ask for a shorter or longer answer in the messages, or set max_tokens"),
    "web_search_options": Refused((), "web search is not supported"),
    "lora": Refused(("",), "adapters are not supported yet"),
    "requests": Refused((), "batches are not supported yet; send one request per prompt"),
    "prompt_logprobs": Refused((), "logprobs are not part of this answer; see /ai/v1/chat/completions"),
}

# Bookkeeping of other services: answering as if it were absent is exactly what was asked for.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
})  # fmt: skip
