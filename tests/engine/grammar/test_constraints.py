"""Grammars as constraints: any text of permitted tokens is valid, and a grammar that cannot be enforced is refused by name."""

import json
import random
import shutil
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from training.ember.chat import HERE as DIRECTORY

TOKENIZER = Tokenizer.from_directory(DIRECTORY)
EOS = 0

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 3, "maximum": 40}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "\u00e9t\u00e9", 3, None, {"a": [1]}]},
    {"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"$defs": {"t": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
                     "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/t"},
    {"type": "string", "format": "date"},
    {"type": "object", "properties": {"format": {"type": "string", "format": "path", "maxLength": 4}, "is": {"const": {"format": "path"}}},
     "required": ["format", "is"], "additionalProperties": False},
    {"type": "object", "properties": {"default": {"type": "string", "format": "path", "maxLength": 4}}, "required": ["default"],
     "additionalProperties": False},
]  # fmt: skip


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(GrammarCompiler(DIRECTORY, TOKENIZER.vocab_size, [EOS]))
    yield made
    made.close()


def started(grammars: Grammars, kind: Any, text: str, delivered: tuple[int, ...] = ()) -> Matcher:
    return grammars.compile(Constraint(kind, text), delivered).result(timeout=60)


def allowed(bits: "array[int]", tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return [token for token in range(tokenizer.vocab_size) if bits[token // 32] >> token % 32 & 1]


def walk(matcher: Matcher, draw: random.Random, most: int = 200) -> list[int]:
    """Return random permitted tokens up to a permitted end, or an empty list if there is none within `most` tokens."""
    tokens: list[int] = []
    while not matcher.is_complete and len(tokens) < most:
        choices = allowed(matcher.mask())
        token = EOS if EOS in choices and draw.random() < 0.3 else draw.choice(choices)
        if token == EOS:
            return tokens
        matcher.accept(token)
        tokens.append(token)
    return tokens if matcher.is_complete else []


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_whatever_is_chosen_is_a_document_of_the_schema(grammars: Grammars, schema: dict[str, Any]) -> None:
    finished = 0
    for seed in range(20):
        tokens = walk(started(grammars, "json_schema", json.dumps(schema)), random.Random(seed))
        if tokens:
            finished += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
    assert finished >= 1


@pytest.mark.parametrize(
    ("kind", "text", "texts"),
    [
        ("regex", "(yes|no)[!?]", {"yes!", "yes?", "no!", "no?"}),
        ("choice", '["red", "a \\"b\\"\\n", "re"]', {"red", 'a "b"\n', "re"}),
        ("choice", '["a/b|(c)", "\\\\d", "\u00e9 -&~#", ".*"]', {"a/b|(c)", "\\d", "\u00e9 -&~#", ".*"}),
        ("lark", 'start: "x" y ~ 2\ny: "a" | "b"', {"xaa", "xab", "xba", "xbb"}),
    ],
)
def test_all_that_a_grammar_allows_is_chosen_and_nothing_else(
    grammars: Grammars, kind: str, text: str, texts: set[str]
) -> None:
    found = {TOKENIZER.decode(walk(started(grammars, kind, text), random.Random(seed))) for seed in range(80)}
    assert found == texts


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"not": {"type": "string"}}', '"not"'),
        ("json_schema", '{"type": "object", "if": {}, "then": {}}', '"if"'),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"type": "colour"}', "colour"),
        ("json_schema", '{"type": "string", "format": "uri-template"}', "Unknown format: uri-template"),
        ("json_schema", "[1", "cannot be read"),
        ("json_schema", '{"$ref": "#"}', "nothing satisfies it"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("regex", "(ab", "unclosed group"),
        ("lark", "start: missing", "missing"),
        (
            "lark",
            'start: arguments\narguments: %json {"type": "str"}',
            "failed to compile JSON schema: Invalid type: str",
        ),
        ("json_schema", '{"const": "a <tool_call> b"}', "spells the token '<tool_call>'"),
        ("choice", '["a", "<|im_end|>"]', "spells the token '<|im_end|>'"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(grammars: Grammars, kind: str, text: str, reason: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        started(grammars, kind, text)
    assert reason in str(refused.value)
    assert " | " not in str(refused.value), "the error quotes a line of the internal grammar"
    assert len(str(refused.value)) < 700
    assert walk(started(grammars, "regex", "a"), random.Random(0)) != [], "the next grammar is compiled"


def test_a_choice_may_be_among_thousands(grammars: Grammars) -> None:
    texts = [f"w{i}" for i in range(4096)]
    found = TOKENIZER.decode(walk(started(grammars, "choice", json.dumps(texts)), random.Random(1)))
    assert found in texts


def test_a_matcher_continues_after_delivered_tokens(grammars: Grammars) -> None:
    schema = json.dumps(SCHEMAS[1])
    tokens = walk(started(grammars, "json_schema", schema), random.Random(3))
    for cut in range(len(tokens) + 1):
        there = started(grammars, "json_schema", schema, tuple(tokens[:cut]))
        for token in tokens[cut:]:
            assert token in allowed(there.mask())
            there.accept(token)
        assert there.is_complete
    with pytest.raises(ConstraintError):
        started(grammars, "json_schema", schema, (tokens[-1],))


def test_sequences_of_one_grammar_stand_where_they_are(grammars: Grammars) -> None:
    first, second = (started(grammars, "regex", "[ab]c") for _ in range(2))
    (token,) = TOKENIZER.encode("a")
    first.accept(token)
    assert token not in allowed(first.mask())
    assert token in allowed(second.mask())


def test_masks_behind_drafts_are_those_of_tokens_taken_one_by_one_and_nothing_is_taken(grammars: Grammars) -> None:
    schema = json.dumps(SCHEMAS[1])
    tokens = walk(started(grammars, "json_schema", schema), random.Random(5))
    wrong = TOKENIZER.encode("zzz")
    for start in range(len(tokens)):
        drafted = started(grammars, "json_schema", schema, tuple(tokens[:start]))
        drafts = [*tokens[start : start + 3], *wrong]
        masks = drafted.masks(drafts)
        assert len(masks) == len(drafts) + 1
        for behind in range(min(3, len(tokens) - start)):
            assert masks[behind] == started(grammars, "json_schema", schema, tuple(tokens[: start + behind])).mask()
        assert drafted.mask() == masks[0]


class SlowCompiler(GrammarCompiler):
    """A compiler that waits, for grammars whose text begins with "slow", until `may_end` is set."""

    def __init__(self) -> None:
        super().__init__(DIRECTORY, TOKENIZER.vocab_size, [EOS])
        self.may_end = threading.Event()
        self.compiled: list[str] = []

    def compile(self, constraint: Constraint) -> Any:
        if constraint.text.startswith("slow"):
            assert self.may_end.wait(60)
        self.compiled.append(constraint.text)
        return super().compile(constraint)


def test_a_tenant_s_slow_grammars_hold_up_no_other_tenant() -> None:
    grammars = Grammars(compiler := SlowCompiler())
    started(grammars, "regex", "known")
    compiler.compiled.clear()
    waiting = [grammars.compile(Constraint("regex", f"slow{i}"), (), b"a") for i in range(4)]
    for text in ("quick", "known"):
        assert grammars.compile(Constraint("regex", text), (), b"b").result(timeout=60).mask()
    own = grammars.compile(Constraint("regex", "own"), (), b"a")
    assert grammars.compile(Constraint("regex", "known"), (), b"a").result(timeout=60).mask()
    assert compiler.compiled == ["quick"]
    assert waiting[1].cancel()
    compiler.may_end.set()
    assert own.result(timeout=60).mask()
    assert compiler.compiled == ["quick", *(f"slow{i}" for i in range(4)), "own"]
    grammars.close()


def test_what_is_compiled_waits_for_no_compile_at_all() -> None:
    grammars = Grammars(compiler := SlowCompiler())
    started(grammars, "regex", "known")
    waiting = [grammars.compile(Constraint("regex", f"slow{i}"), (), bytes([i])) for i in range(8)]
    assert started(grammars, "regex", "known").mask()
    assert not any(each.done() for each in waiting)
    compiler.may_end.set()
    assert all(each.result(timeout=60).mask() for each in waiting)
    grammars.close()


def test_a_grammar_that_failed_is_compiled_again(tmp_path: Path) -> None:
    made = Grammars(GrammarCompiler(tmp_path, TOKENIZER.vocab_size, [EOS]))
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        started(made, "regex", "a")
    shutil.copy(DIRECTORY / "tokenizer.json", tmp_path)
    assert started(made, "regex", "a").mask()
    made.close()


def test_added_tokens_without_embeddings_are_no_part_of_a_grammar(tmp_path: Any) -> None:
    fields = json.loads((DIRECTORY / "tokenizer.json").read_text())
    further = {**fields["added_tokens"][-1], "id": TOKENIZER.vocab_size, "content": "<pad>"}
    fields["added_tokens"].append(further)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    made = Grammars(GrammarCompiler(tmp_path, TOKENIZER.vocab_size, [EOS]))
    assert started(made, "regex", "<pad>").mask()
    made.close()


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Any) -> None:
    made = Grammars(GrammarCompiler(tmp_path, 10, [0]))
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        made.compile(Constraint("regex", "a")).result(timeout=60)
    made.close()
