"""The schemas inside a JSON schema, independent of their meaning."""

from collections.abc import Callable
from typing import Any

_VALUES = ("enum", "const", "default", "examples")  # keys whose values are not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keys of schemas by name


def with_subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema whose parts are the results of `change`, except values such as those of `enum`.

    The name of a property, for example "default", is no key of the schema.
    """
    return {
        key: {name: change(named) for name, named in part.items()}
        if key in _NAMED and isinstance(part, dict)
        else part
        if key in _VALUES
        else change(part)
        for key, part in schema.items()
    }
