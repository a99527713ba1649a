"""OpenAI's completions: the model continues a text or token ids."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from pilotlight.dialects.body.bodies import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    SamplingBody,
    StreamingBody,
    StreamOptionsBody,
    TokenIds,
    are_token_ids,
)
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.body.parsing import (
    Resolve,
    constraint_in,
    include_usage,
    known_model,
    num_prompt_logprobs,
    parse_body,
    prompt_options,
    sampling_of,
)
from pilotlight.dialects.requests import Insertion, Prompt, ValidGeneration
from pilotlight.wire.errors import ApiError

MAX_PROMPTS = 64  # maximum number of prompts of one request; a router can continue a stream of so many choices


def _prompts(value: Any) -> Any:
    """Convert a text, a list of token ids, or a list of either to a list of texts and lists of token ids."""
    if isinstance(value, str) or are_token_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and isinstance(value[0], str | list):
        raise ValidationError(f"has {len(value)} prompts; send at most {MAX_PROMPTS} in one request")
    if isinstance(value, list) and value and all(isinstance(item, str) or are_token_ids(item) for item in value):
        return value
    raise ValidationError("must be a text, a non-empty list of token ids (whole numbers), or a list of either")


class CompletionBody(StreamingBody, frozen=True, kw_only=True):
    READERS: ClassVar = {**SamplingBody.READERS, "prompt": _prompts}
    PARTS: ClassVar = {"stream_options": StreamOptionsBody}

    model: str
    # The default is OpenAI's and vLLM's. With 0 and `echo`, only the prompt is returned.
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16
    echo: bool | None = None
    suffix: str | None = None  # the answer is the text between the prompt and this
    prompt: tuple[str | TokenIds, ...]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out `best_of` if it equals `n`, because then all answers are returned."""
        if type(best_of := values.get("best_of")) is int and best_of == values.get("n"):
            return {name: value for name, value in values.items() if name != "best_of"}
        return values


class ValidCompletion(ValidGeneration, frozen=True):
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    return_token_ids: bool = False
    echo: bool = False
    further_prompts: tuple[Prompt, ...] = ()

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


def parse_completion(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidCompletion:
    body, ignored = parse_body(CompletionBody, raw, strict)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("invalid_request", "max_tokens: must be at least 1, or echo true", param="max_tokens")
    prompts = tuple(_before(prompt, body) for prompt in body.prompt) if body.suffix else body.prompt
    return ValidCompletion(
        model=known_model(body.model, resolve),
        requested_model=body.model,
        prompt=prompts[0],
        further_prompts=prompts[1:],
        sampling=sampling_of(body, body.max_tokens, num_logprobs=body.logprobs),
        stream=bool(body.stream),
        n=body.n or 1,
        ignored=ignored,
        num_prompt_logprobs=num_prompt_logprobs(body),
        include_usage=include_usage(body),
        usage_in_every_chunk=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        constraint=constraint_in(body),
        **prompt_options(body),
    )


def _before(prompt: str | tuple[int, ...], body: CompletionBody) -> Insertion:
    """Return a prompt with the body's suffix. Raises ApiError."""
    if body.echo or not isinstance(prompt, str):
        with_what = "echo" if body.echo else "a prompt of token ids"
        raise ApiError("invalid_request", f"suffix: cannot be combined with {with_what}", param="suffix")
    return Insertion(prompt, body.suffix or "")
