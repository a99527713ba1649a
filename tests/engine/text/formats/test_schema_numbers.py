"""Numbers in schemas: an accepted number is enforced exactly, and one that would be rounded is refused by name."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import ConstraintError
from pilotlight.engine.text.formats.schema_numbers import InexactNumberError, check_lark, check_schema, without_inexact
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from training.ember.chat import HERE

TOKENIZER = Tokenizer.from_directory(HERE)
BIG = 2**53


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(GrammarCompiler(HERE, TOKENIZER.vocab_size, [0]))
    yield made
    made.close()


def allows(grammars: Grammars, schema: dict[str, Any], text: str) -> bool:
    matcher = grammars.compile(Constraint("json_schema", json.dumps(schema))).result(timeout=60)
    tokens = TOKENIZER.encode(text)
    if matcher.num_allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        matcher.accept(token)
    return matcher.is_complete or bool(matcher.mask()[0] & 1)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"const": BIG}, [BIG], [BIG - 1, BIG + 1]),
        ({"enum": [BIG + 2, -(2**60)]}, [BIG + 2, -(2**60)], [BIG + 1, BIG + 3, 1 - 2**60, -(2**60) - 1]),
        ({"const": 2**63 - 1024}, [2**63 - 1024], [2**63 - 1023, 2**63 - 1025]),
        ({"const": 1024 - 2**63}, [1024 - 2**63], [1025 - 2**63]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [-1, 2**63]),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**60 + 256}, [2**60, 2**60 + 256], [2**60 - 1, 2**60 + 257]),
        ({"type": "integer", "exclusiveMaximum": BIG - 1}, [BIG - 2], [BIG - 1]),
        ({"type": "integer", "exclusiveMinimum": 1 - BIG, "maximum": 0}, [2 - BIG, 0], [1 - BIG, 1]),
    ],
)
def test_a_number_that_passes_is_enforced_exactly(
    grammars: Grammars, schema: dict[str, Any], taken: list[int], refused: list[int]
) -> None:
    check_schema(schema)
    assert [number for number in (*taken, *refused) if allows(grammars, schema, str(number))] == taken


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"enum": [1234567890123456789]}, "enum"),
        ({"enum": [-9223372036854775807]}, "enum"),
        ({"const": {"id": [BIG + 1]}}, "const"),
        ({"const": -(2**63)}, "const"),
        ({"properties": {"id": {"anyOf": [{"const": BIG + 1}]}}}, "const"),
        ({"type": "integer", "maximum": BIG + 1}, "maximum"),
        ({"properties": {"default": {"type": "integer", "maximum": BIG + 1}}}, "maximum"),
        ({"properties": {"enum": {"type": "integer", "maximum": BIG + 1}}}, "maximum"),
        ({"type": "integer", "maximum": 2**64 - 1}, "maximum"),
        ({"type": "integer", "minimum": -BIG - 1}, "minimum"),
        ({"type": "integer", "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum"),
        ({"type": "integer", "exclusiveMinimum": BIG}, "exclusiveMinimum"),
        ({"type": "integer", "multipleOf": BIG + 1}, "multipleOf"),
    ],
)
def test_a_number_that_would_be_enforced_as_another_one_is_refused_by_name(
    grammars: Grammars, schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(InexactNumberError, match=keyword):
        check_schema(schema)
    for constraint in (
        Constraint("json_schema", json.dumps(schema)),
        Constraint("lark", f"start: a | b\na: %json {json.dumps(schema)}\nb: %json {{}}"),
        Constraint("lark", f"start: %json{json.dumps(schema, indent=1)}"),
    ):
        with pytest.raises(ConstraintError, match=keyword):
            grammars.compile(constraint).result(timeout=60)
    check_schema(without_inexact(schema))


def test_examples_and_defaults_are_no_part_of_what_is_enforced() -> None:
    check_schema({"type": "integer", "default": BIG + 1, "examples": [BIG + 1]})
    check_lark('start: "%json {" /.*/')


@pytest.mark.parametrize("name", ["minLength", "maxLength", "minItems", "maxItems", "minProperties"])
def test_a_size_may_be_written_as_a_fraction_that_is_whole(grammars: Grammars, name: str) -> None:
    kind = "string" if "Length" in name else "array" if "Items" in name else "object"
    value = {"string": '"a"', "array": "[1]", "object": '{"a": 1}'}[kind]
    assert allows(grammars, {"type": kind, name: 1.0}, value)
