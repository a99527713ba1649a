"""OpenAI's embeddings: vectors of texts or of token ids."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from pilotlight.dialects.body.bodies import Body, TokenIds, are_token_ids
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.body.parsing import Resolve, known_model, parse_body
from pilotlight.dialects.requests import ValidEmbedding

MAX_INPUTS = 2048  # limit of one request, as at OpenAI


def read_inputs(value: Any) -> Any:
    """Convert a text, token ids, or a list of either to a list of texts and lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValidationError("must be a text, a list of texts, a list of token ids or a list of such lists; not empty")
    if len(value) > MAX_INPUTS:
        raise ValidationError(f"has {len(value)} texts; send at most {MAX_INPUTS} in one request")
    for position, item in enumerate(value):
        if item in ("", []):
            raise ValidationError(f"text {position} is empty; leave it out")
        if not isinstance(item, str) and not are_token_ids(item):
            raise ValidationError(f"text {position} is neither a text nor a list of token ids (whole numbers)")
    return value


class EmbeddingBody(Body, frozen=True, kw_only=True):
    READERS: ClassVar = {"input": read_inputs}

    model: str
    input: tuple[str | TokenIds, ...]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    prompt_name: Annotated[str, Meta(max_length=200)] | None = None  # a parameter of text-embeddings-inference


def parse_embedding(raw: bytes, resolve: Resolve, *, strict: bool = False) -> ValidEmbedding:
    body, ignored = parse_body(EmbeddingBody, raw, strict)
    return ValidEmbedding(
        model=known_model(body.model, resolve),
        requested_model=body.model,
        inputs=body.input,
        dimensions=body.dimensions,
        as_base64=body.encoding_format == "base64",
        ignored=ignored,
        prompt_name=body.prompt_name,
    )
