"""Random JSON schemas: every kind of value, bounds, references and alternatives.

A few have a keyword that no engine can enforce.
"""

import random
import string
from typing import Any

JsonSchema = dict[str, Any]

FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname")
PATTERNS = ("^[A-Z]{2,4}$", "^[a-z]+-[0-9]{1,3}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$", "^x?y*z$")
NOT_ENFORCED = (
    {"not": {"type": "null"}},
    {"if": {"type": "object"}, "then": {}},
    {"uniqueItems": True, "type": "array"},
)


def random_schema(draw: random.Random, depth: int = 3) -> JsonSchema:
    kinds = [_string, _number, _integer, _enum, _const, _boolean]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _any_of, _all_of, _recursive]
    return draw.choice(kinds)(draw, depth)


def schemas(count: int, seed: int = 0, share_not_enforced: float = 0.05) -> list[JsonSchema]:
    """Draw `count` schemas, of which the given share has a keyword that must be refused."""
    draw = random.Random(seed)
    made = [random_schema(draw) for _ in range(count)]
    return [
        {"type": "object", "properties": {"a": draw.choice(NOT_ENFORCED)}, "required": ["a"]}
        if draw.random() < share_not_enforced
        else schema
        for schema in made
    ]


def _name(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase + '_ \u00e9"/', k=draw.randint(1, 6)))


def _string(draw: random.Random, depth: int) -> JsonSchema:
    least = draw.randint(0, 3)
    return draw.choice([
        {"type": "string", "maxLength": draw.randint(1, 8)},
        {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)},
        {"type": "string", "pattern": draw.choice(PATTERNS)},
        {"type": "string", "format": draw.choice(FORMATS)},
    ])  # fmt: skip


def _number(draw: random.Random, depth: int) -> JsonSchema:
    low = round(draw.uniform(-50, 50), draw.randint(0, 2))
    return draw.choice([
        {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 90)},
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(1, 90)},
        {"type": "number", "minimum": low, "maximum": low + 100, "multipleOf": draw.choice([0.5, 0.25, 3])},
    ])  # fmt: skip


def _integer(draw: random.Random, depth: int) -> JsonSchema:
    low = draw.randint(-2000, 2000)
    return draw.choice([
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)},
        {"type": "integer", "minimum": low, "maximum": low + 1000, "multipleOf": draw.randint(2, 7)},
    ])  # fmt: skip


def _enum(draw: random.Random, depth: int) -> JsonSchema:
    values: list[Any] = [_name(draw), draw.randint(-9, 99), None, True, [1, "a"], {"k": 1.5}]
    return {"enum": draw.sample(values, draw.randint(1, len(values)))}


def _const(draw: random.Random, depth: int) -> JsonSchema:
    return {"const": draw.choice([_name(draw), 3, None, {"a": [_name(draw)]}])}


def _boolean(draw: random.Random, depth: int) -> JsonSchema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _object(draw: random.Random, depth: int) -> JsonSchema:
    names = list(dict.fromkeys(_name(draw) for _ in range(draw.randint(0, 4))))
    made: JsonSchema = {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
    }
    further = draw.random()
    if further < 0.7:
        made["additionalProperties"] = False
    elif further < 0.85:
        made["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return made


def _array(draw: random.Random, depth: int) -> JsonSchema:
    least = draw.randint(0, 2)
    made: JsonSchema = {"type": "array", "items": random_schema(draw, depth - 1), "minItems": least}
    if draw.random() < 0.3:
        made["prefixItems"] = [random_schema(draw, 0) for _ in range(draw.randint(1, 2))]
    return {**made, "maxItems": least + draw.randint(1, 3)}


def _any_of(draw: random.Random, depth: int) -> JsonSchema:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _all_of(draw: random.Random, depth: int) -> JsonSchema:
    first = _object(draw, depth)
    name = _name(draw)
    if not first.get("additionalProperties", True):
        del first["additionalProperties"]
    return {"allOf": [first, {"properties": {name: _integer(draw, 0)}, "required": [name]}]}


def _recursive(draw: random.Random, depth: int) -> JsonSchema:
    node = {
        "type": "object",
        "properties": {
            "value": random_schema(draw, 0),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"} if depth == 3 else {"type": "null"}  # only at the root
