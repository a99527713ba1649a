"""The grammars of tool formats: in random answers that follow a grammar, the format's parser finds only permitted calls."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import Matcher
from pilotlight.engine.text.formats import AnswerFormat, AnswerRules, CallableTool, Thinking
from pilotlight.engine.text.formats.format_registry import FORMATS
from pilotlight.engine.text.formats.grammars import document
from pilotlight.engine.text.formats.tools.thinking import TAGS as THINK_TAGS
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from tests.engine.grammar.test_constraints import allowed
from tests.engine.text.formats.reading import Read, parts_of, told
from training.ember.chat import HERE

CITY = {
    "$defs": {"c": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/c"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
NOTE = {
    "type": "object", "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["text", "tags"], "additionalProperties": False,
}  # fmt: skip
CODE = {
    "type": "object", "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"}, "word": {"type": "string", "pattern": "a|e", "maxLength": 5}},
    "required": ["code", "word"], "additionalProperties": False,
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": CITY,
    "note": NOTE,
    "code": CODE,
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = tuple(CallableTool(name, schema) for name, schema in SCHEMAS.items())
EOS = 2
MOST = 400  # at most so many tokens in an answer


class Writer(NamedTuple):
    """A format with a tokenizer and grammars, which writes random answers."""

    answers: AnswerFormat
    tokenizer: Tokenizer
    grammars: Grammars

    def tokens(self, rules: AnswerRules, thinking: Thinking, seed: int) -> list[int] | None:
        """Return random permitted tokens up to the end; None if there is no end within MOST tokens."""
        text = self.answers.grammar(thinking, rules)
        draw, matcher = random.Random(seed), self.grammars.compile(Constraint("lark", text)).result(60)
        tokens: list[int] = []
        spelled = self.tokenizer.encode(f"Hm{THINK_TAGS[0][1]}") if thinking is Thinking.OPEN else ()
        if spelled and spelled[0] in allowed(matcher.mask(), self.tokenizer):
            tokens += spelled  # drawn tokens would hardly ever spell the end of the reasoning
            for token in tokens:
                matcher.accept(token)
        while not matcher.is_complete and len(tokens) < MOST:
            choices = allowed(matcher.mask(), self.tokenizer)
            if EOS in choices and draw.random() < 0.3:
                return tokens
            marks = [token for token in choices if token >= self.tokenizer.num_base_tokens and token != EOS]
            rest = [token for token in choices if token != EOS] or marks
            token = draw.choice(marks if marks and draw.random() < 0.3 else rest)
            matcher.accept(token)
            tokens.append(token)
        return tokens if matcher.is_complete else None

    def read(self, tokens: list[int], thinking: Thinking) -> list[Read]:
        return list(told(parts_of(self.answers.parser(thinking, SCHEMAS), tokens)))

    def answers_to(
        self, rules: AnswerRules, thinking: Thinking = Thinking.CLOSED, count: int = 6
    ) -> Iterator[list[Read]]:
        for seed in range(count):
            if (tokens := self.tokens(rules, thinking, seed)) is not None:
                read = self.read(tokens, thinking)
                behind = next((number for number, part in enumerate(read) if part[0] != "reasoning"), len(read))
                yield read[behind:]


def writer(directory: Path, name: str, *, tags: bool, think: int = 0) -> Writer:
    """Return a writer for a format. `tags` tells whether its tags are tokens of the vocabulary."""
    tools = next(each for each in FORMATS if each.name == name)
    fields = json.loads((HERE / "tokenizer.json").read_text())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["special"]]
    every = (*tools.tags, *THINK_TAGS[think][:2]) if tags else ()
    last = max(fields["model"]["vocab"].values())
    fields["added_tokens"] += [
        {**fields["added_tokens"][0], "id": last + 1 + number, "content": tag, "special": False, "normalized": False}
        for number, tag in enumerate(dict.fromkeys(every))
    ]
    (directory / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer.from_directory(directory)
    assert all((tokenizer.added_token_id(tag) is not None) == tags for tag in tools.tags)
    answers = AnswerFormat(tokenizer, tools, THINK_TAGS[think])
    return Writer(answers, tokenizer, Grammars(GrammarCompiler(directory, tokenizer.vocab_size, [EOS])))


# Formats whose tags are plain text in some published vocabularies.
SPELLED = ("hermes", "qwen3_coder", "deepseek_v32")
WRITERS = [
    pytest.param(
        (each.name, tags), marks=() if tags or each.name in SPELLED else pytest.mark.slow, id=f"{each.name}-{tags}"
    )
    for each in FORMATS
    for tags in (True, False)
]


@pytest.fixture(scope="module", params=WRITERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    name, tags = request.param
    found = writer(tmp_path_factory.mktemp("tokenizer"), name, tags=tags)
    yield found
    found.grammars.close()


def assert_allowed(answer: list[Read]) -> None:
    for part in answer:
        if part[0] != "text":
            assert part[0] == "call", part
            jsonschema.validate(json.loads(part[2]), SCHEMAS[part[1]])


@pytest.mark.long
@pytest.mark.parametrize("is_single", [True, False])
def test_an_answer_that_must_call_is_calls_alone(made: Writer, is_single: bool) -> None:
    found = list(made.answers_to(AnswerRules(TOOLS, is_single)))
    for answer in found:
        assert_allowed(answer)
        assert {part[0] for part in answer} == {"call"}
        assert len(answer) == 1 or not is_single
    assert found


def test_line_ends_after_a_call_are_bounded(made: Writer) -> None:
    """A model that likes line ends would otherwise write them up to the limit of its answer, and the answer would count as cut."""
    text = made.answers.grammar(Thinking.CLOSED, AnswerRules(TOOLS[3:]))
    matcher = made.grammars.compile(Constraint("lark", text)).result(60)
    tokens = made.tokens(AnswerRules(TOOLS[3:], is_single=True), Thinking.CLOSED, seed=1)
    assert tokens is not None
    for token in tokens:
        matcher.accept(token)
    [line_end] = made.tokenizer.encode("\n")
    count = 0
    while line_end in allowed(matcher.mask(), made.tokenizer):
        matcher.accept(line_end)
        count += 1
        assert count <= 2
    assert matcher.is_complete or EOS in allowed(matcher.mask(), made.tokenizer)


def test_of_one_tool_no_other_is_called(made: Writer) -> None:
    assert {part[1] for answer in made.answers_to(AnswerRules(TOOLS[:1], True)) for part in answer} == {"get_weather"}


@pytest.mark.long
@pytest.mark.parametrize("is_single", [True, False])
def test_free_text_may_hold_calls_and_those_are_right(made: Writer, is_single: bool) -> None:
    found = list(made.answers_to(AnswerRules(TOOLS, is_single, may_be_text=True), count=30))
    for answer in found:
        assert_allowed(answer)
    assert any(part[0] == "text" for answer in found for part in answer)


def test_a_document_or_calls(made: Writer) -> None:
    rules = AnswerRules(TOOLS, True, document(Constraint("json_schema", json.dumps({"enum": [[1, 2], "three"]}))))
    found = list(made.answers_to(rules))
    if not found:
        pytest.skip("no drawn answer has an end")
    for answer in found:
        assert_allowed(answer)
        assert answer[0][0] == "call" or json.loads(answer[0][1]) in ([1, 2], "three")


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.MAYBE])
def test_a_document_follows_the_reasoning(made: Writer, thinking: Thinking) -> None:
    rules = AnswerRules(document=document(Constraint("choice", '["yes", "no"]')))
    found = list(made.answers_to(rules, thinking))
    assert found
    for ((kind, text),) in found:  # answers_to has removed the reasoning
        assert (kind, text in ("yes", "no")) == ("text", True)


@pytest.mark.long
def test_calls_follow_the_reasoning(made: Writer) -> None:
    found = list(made.answers_to(AnswerRules(TOOLS, True), Thinking.OPEN))
    assert found
    for answer in found:
        assert_allowed(answer)
        assert answer[-1][0] == "call"


@pytest.mark.long
def test_five_hundred_tools_are_a_grammar(made: Writer) -> None:
    tools = tuple(CallableTool(f"tool_{number}", CITY) for number in range(500))
    text = made.answers.grammar(Thinking.CLOSED, AnswerRules(tools, may_be_text=True))
    made.grammars.compile(Constraint("lark", text)).result(60).mask()


def test_text_before_a_call_is_free_and_the_call_is_not(tmp_path: Path) -> None:
    for tags in (True, False):
        found = writer(tmp_path, "hermes", tags=tags)
        text = found.answers.grammar(Thinking.CLOSED, AnswerRules(TOOLS, may_be_text=True))
        matcher = found.grammars.compile(Constraint("lark", text)).result(60)
        follow(found, matcher, 'Well... <tool_call>\n{"name": "get_')
        assert found.tokenizer.encode("x")[0] not in allowed(matcher.mask(), found.tokenizer)
        found.grammars.close()


def follow(made: Writer, matcher: Matcher, text: str) -> None:
    for token in made.tokenizer.encode(text):
        assert token in allowed(matcher.mask(), made.tokenizer)
        matcher.accept(token)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint("regex", r"a/\/\d+"), "a//12"),
        (Constraint("regex", "a\nb"), "a\nb"),
        (Constraint("choice", '["\\u00e9/\\n"]'), "\u00e9/\n"),
        (Constraint("lark", 'start: x "c"\nx: "a" | "b"'), "bc"),
        (
            Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}'),
            "[1,\n 2]",
        ),
    ],
)
def test_every_kind_of_constraint_stands_in_a_grammar(tmp_path: Path, constraint: Constraint, text: str) -> None:
    found = writer(tmp_path, "hermes", tags=True)
    rules = AnswerRules(document=document(constraint))
    matcher = found.grammars.compile(Constraint("lark", found.answers.grammar(Thinking.OPEN, rules))).result(60)
    follow(found, matcher, f"Hm</think>\n\n{text}")
    assert matcher.is_complete or EOS in allowed(matcher.mask(), found.tokenizer)
    found.grammars.close()


@pytest.mark.parametrize(
    ("pattern", "words"), [("^a|b$", "put them in a group"), ("a|b$", "put them in a group"), (3, "is not a string")]
)
def test_a_pattern_that_means_several_things_is_refused_by_name(tmp_path: Path, pattern: Any, words: str) -> None:
    made = writer(tmp_path, "qwen3_coder", tags=True)
    for allowed_one in (r"^(a|b)$", r"^[|]\|$", "a|b", r"^\$"):
        schema = {"type": "object", "properties": {"key": {"type": "string", "pattern": allowed_one}}}
        assert made.answers.grammar(Thinking.CLOSED, AnswerRules((CallableTool("f", schema),), True))
    schema = {"type": "object", "properties": {"key": {"type": "string", "pattern": pattern}}}
    with pytest.raises(ValueError, match=words):
        made.answers.grammar(Thinking.CLOSED, AnswerRules((CallableTool("f", schema),), True))
    made.grammars.close()


def test_a_grammar_may_quote_what_is_a_token(tmp_path: Path) -> None:
    made = writer(tmp_path, "hermes", tags=True)
    lark = """start: "a <tool_call>" OTHER "</tool_call>" // "<tool_call>"\nOTHER: /"x"/"""
    matcher = made.grammars.compile(Constraint("lark", lark)).result(60)
    tokens: list[int] = []
    while not matcher.is_complete:
        tokens.append(next(token for token in allowed(matcher.mask(), made.tokenizer) if token != EOS))
        matcher.accept(tokens[-1])
    assert made.tokenizer.decode(tokens) == 'a <tool_call>"x"</tool_call>'
    assert {made.tokenizer.added_token_id(tag) for tag in ("<tool_call>", "</tool_call>")} <= set(tokens)
    made.grammars.close()
