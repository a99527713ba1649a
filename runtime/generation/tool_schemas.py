"""The schemas of tool calls, as the client wrote them or reduced to their enforceable part.

Independent of models, grammars and requests.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pilotlight.engine.text.formats.schema_numbers import without_inexact
from pilotlight.engine.text.formats.subschemas import with_subschemas

_ADDS_KEYS = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "propertyNames", "dependentRequired",
    "dependentSchemas", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if",
}  # fmt: skip
FREE: dict[str, Any] = {"type": "object"}  # for the arguments of a tool whose schema cannot be enforced
# for a tool without parameters
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")  # lookaround and backreferences, which no automaton can match


class EnforcedSchema(NamedTuple):
    schema: dict[str, Any]
    left_out: str = ""  # the part of the client's schema that is not enforced


def enforced_schemas(function: dict[str, Any]) -> Iterator[EnforcedSchema]:
    """Yield schemas for a tool's arguments, the strictest first. The last one can always be enforced."""
    whole = arguments_of(function)
    plain = without_inexact(whole)
    found = [EnforcedSchema(whole)]
    found.append(EnforcedSchema(plain, "number"))
    found.append(EnforcedSchema(without_patterns(plain, _LOOKS_AROUND), "pattern"))
    found.append(EnforcedSchema(without_patterns(plain, re.compile("")), "pattern"))
    found.append(EnforcedSchema(FREE, "parameters"))
    for number, each in enumerate(found):
        if all(each.schema != other.schema for other in found[:number]):
            yield each


def arguments_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments; keys that it does not name are forbidden."""
    if function.get("parameters") is None:  # OpenAI: omitting it "defines a function with an empty parameter list"
        return NONE
    return closed({"type": "object", **without_descriptions(function["parameters"])})


def without_patterns(schema: Any, refused: re.Pattern[str]) -> Any:
    """Return a schema without the `pattern`s in which `refused` matches."""
    if isinstance(schema, list):
        return [without_patterns(part, refused) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = with_subschemas(schema, lambda part: without_patterns(part, refused))
    if isinstance(kept.get("pattern"), str) and refused.search(kept["pattern"]):
        del kept["pattern"]
    return kept


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments that forbids keys other than its own.

    It is unchanged if it names no keys, requires a key that it does not name, or has another part that may add keys."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or any(word in schema for word in _ADDS_KEYS):
        return schema
    if isinstance(required, list) and not all(isinstance(key, str) and key in properties for key in required):
        return schema
    kept = {key: closed(value) if isinstance(value, dict) else value for key, value in properties.items()}
    return {**schema, "properties": kept, "additionalProperties": False}


def without_descriptions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles, descriptions and comments."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, dict):
            kept[key] = value if key in ("const", "default") else without_descriptions(value)
        elif isinstance(value, list) and key not in ("enum", "const", "default", "examples"):
            kept[key] = [without_descriptions(item) if isinstance(item, dict) else item for item in value]
        elif not (key in ("description", "title", "$comment") and isinstance(value, str)):
            kept[key] = value
    return kept
