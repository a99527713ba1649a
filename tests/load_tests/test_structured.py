"""The schemas of the benchmark of structured output, from a checkout of the test suite of JSON Schema."""

import json
from pathlib import Path

import pytest

from load_tests.scenarios.structured import SUITE_DRAFT, invalid, suite_schemas


def test_every_schema_that_is_an_object_is_taken_once(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / SUITE_DRAFT / "optional"
    folder.mkdir(parents=True)
    cases = [{"description": "x", "schema": schema, "tests": ()} for schema in ({"type": "null"}, True, {"not": True})]
    (folder.parent / "a.json").write_text(json.dumps(cases))
    (folder / "b.json").write_text(json.dumps(cases[:1]))
    assert suite_schemas(tmp_path) == ['{"type": "null"}', '{"not": true}']


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it is not a checkout of JSON Schema's test suite"):
        suite_schemas(tmp_path)


@pytest.mark.parametrize(
    ("answer", "schema", "is_valid"),
    [
        ("4766315.4553", {"multipleOf": 0.0001}, True),
        ("4766315.45535", {"multipleOf": 0.0001}, False),
        ('"\u016d"', {"pattern": r"^\W$"}, True),
        ('"\u016d"', {"pattern": r"^\w$"}, False),
        ('"\u00a0"', {"pattern": r"^\s$"}, True),
        ("[1.5, 2]", {"enum": [[1.5, 2]]}, True),
        ("[1,", {}, False),
    ],
)
def test_an_answer_is_judged_as_json_schema_means_it(answer: str, schema: dict[str, object], is_valid: bool) -> None:
    assert (invalid(answer, json.dumps(schema)) is None) == is_valid
