"""JSON Schemas of the dialects' requests and answers, from their structs.

A struct declares only the normalised form of a field; the other accepted forms are added here."""

from typing import Any

import msgspec

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PARTS: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
}
_TEXTS: Schema = {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1}]}
_TOOL: Schema = {"type": "object", "required": ["function"], "properties": {"type": {"const": "function"}, "function": {
    "type": "object", "required": ["name"], "properties": {"name": _TEXT}}}}  # fmt: skip
_ALLOWED: Schema = {"type": "object", "required": ["type", "allowed_tools"], "properties": {
    "type": {"const": "allowed_tools"}, "allowed_tools": {"type": "object", "required": ["mode", "tools"], "properties": {
        "mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _TOOL, "minItems": 1}}}}}  # fmt: skip

# Forms of a field, for all bodies that have a reader for it.
_FORMS: dict[str, Schema] = {
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 128}]},
    "content": {"anyOf": [{"type": "string"}, _PARTS]},
    "image": {
        "anyOf": [_TEXT, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 1}]
    },
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", "any"]}, _TOOL, _ALLOWED]},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "prompt": _TEXTS,
    "text": _TEXTS,
}
_OF_BODIES: dict[tuple[str, str], Schema] = {("EmbeddingBody", "input"): _TEXTS}
_PLAIN = (
    ("RunBody", "prompt"),
    ("ResponsesBody", "text"),
    ("ResponsesBody", "tool_choice"),
    ("MessagesBody", "tool_choice"),
)


def components(kinds: list[Any], template: str) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schemas of the types, and those of the structs in them, by name.

    `template` is the form of a reference to a struct, with `{name}`."""
    schemas, named = msgspec.json.schema_components(kinds, ref_template=template)
    return list(schemas), {name: _as_taken(name, schema) for name, schema in named.items()}


def schema_of(kind: Any) -> Schema:
    """Return the schema of a type, including all schemas that it refers to."""
    (schema,), named = components([kind], "#/$defs/{name}")
    return {**schema, "$defs": named}


def _as_taken(name: str, schema: Schema) -> Schema:
    """Return a struct's schema with all accepted forms of its fields. Unknown fields are allowed."""
    kept = {key: value for key, value in schema.items() if (key, value) != ("additionalProperties", False)}
    if not name.endswith("Body"):
        return kept
    properties = dict(kept.get("properties", {}))
    for field, declared in properties.items():
        form = _OF_BODIES.get((name, field)) or (None if (name, field) in _PLAIN else _FORMS.get(field))
        if form is not None:
            is_optional = field not in kept.get("required", ())
            properties[field] = {"anyOf": [*form.get("anyOf", [form]), {"type": "null"}]} if is_optional else form
            if "default" in declared:
                properties[field]["default"] = declared["default"]
    return {**kept, "properties": properties}
