"""Constraints on an answer, from the parameters of several APIs.

These are OpenAI's `response_format`, Workers AI's simpler form of it, vLLM's `structured_outputs` and `guided_...`, and SGLang's `regex` and
`json_schema`. This module checks shapes and sizes only. The engine checks before the first token whether it can enforce a grammar.
"""

from typing import Any

import orjson

from pilotlight.dialects.body.bodies import CONSTRAINING, SamplingBody, not_deep
from pilotlight.dialects.body.exact_json import exact_loads
from pilotlight.dialects.body.invalid_values import ValidationError
from pilotlight.dialects.requests import AnswerConstraint
from pilotlight.wire.errors import ApiError

MAX_BYTES = 256 << 10  # maximum size of one constraint
MAX_CHOICES = 4096
ANY_OBJECT = AnswerConstraint("json_schema", '{"type":"object"}')

_GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar", "regex": "regex",
    "json_schema": "json",
}  # fmt: skip
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def constraint_of(body: SamplingBody) -> AnswerConstraint | None:
    """Return the request's constraint, if any. Raises ApiError if it is invalid or there are several."""
    found: dict[str, AnswerConstraint] = {}
    for name in CONSTRAINING:
        value = getattr(body, name)
        if value is None:
            continue
        try:
            constraint = _of(name, value)
        except ValidationError as error:
            raise ApiError(error.word, f"{name}: {error}", param=name) from None
        if constraint is not None:
            found[name] = constraint
    if len(found) > 1:
        names = " and ".join(found)
        raise ApiError("invalid_request", f"{names} each constrain the answer; send only one", param=[*found][-1])
    return next(iter(found.values()), None)


def _of(name: str, value: Any) -> AnswerConstraint | None:
    if name == "response_format":
        return _response_format(value)
    if name in _GUIDED:
        return _structured(_GUIDED[name], value)
    asked = {kind: wanted for kind, wanted in value.items() if wanted is not None}
    if len(asked) != 1 or not asked.keys() <= set(_KINDS):
        raise ValidationError(f"must be an object with one of {', '.join(_KINDS)}")
    (kind, wanted), *_ = asked.items()
    if kind == "json_object":
        return ANY_OBJECT if wanted else None
    return _structured(kind, wanted)


def _response_format(value: dict[str, Any]) -> AnswerConstraint | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            # llama.cpp accepts a schema here.
            return ANY_OBJECT if value.get("schema") is None else schema_constraint(value["schema"])
        case "json_schema":
            given = value.get("json_schema", value if "schema" in value else None)
            if not isinstance(given, dict):
                raise ValidationError("of type json_schema needs json_schema, an object")
            # OpenAI wraps the schema in an object with a name; Workers AI does not.
            wrapped = given.get("schema") if isinstance(given.get("name"), str) or "schema" in given else given
            return schema_constraint(given if wrapped is None else wrapped)
    raise ValidationError('must have the type "text", "json_object" or "json_schema"')


def _structured(kind: str, value: Any) -> AnswerConstraint:
    if kind == "json":
        return schema_constraint(value)
    if kind == "choice":
        is_listed = isinstance(value, list) and all(isinstance(choice, str) and choice for choice in value)
        if not is_listed or not 0 < len(value) <= MAX_CHOICES:
            raise ValidationError(f"must be a list of 1 to {MAX_CHOICES} strings, none of them empty")
        return _sized("choice", orjson.dumps(value).decode())
    if not isinstance(value, str) or not value:
        raise ValidationError("must be a string, and not empty")
    return _sized("regex" if kind == "regex" else "lark", value)


def schema_constraint(value: Any) -> AnswerConstraint:
    """Return the constraint for a JSON Schema, given as an object or as JSON text. Raises ValidationError."""
    if isinstance(value, str):
        try:
            value = exact_loads(value)
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValidationError("the schema must be an object")
    return _sized("json_schema", orjson.dumps(not_deep(value)).decode())


def _sized(kind: Any, text: str) -> AnswerConstraint:
    if len(text) > MAX_BYTES:
        raise ValidationError(f"is larger than {MAX_BYTES >> 10} KiB")
    return AnswerConstraint(kind, text)
