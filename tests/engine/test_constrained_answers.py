"""Answers that follow a grammar, by the embedded model: each conforms in all circumstances, and other answers are unaffected."""

import json
import math
from typing import Any, TypeVar

import jsonschema
import pytest

from pilotlight.engine.api.protocol import Constraint, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher
from pilotlight.engine.grammar.token_masks import TokenMasks
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.formats import AnswerRules, CallableTool, Thinking
from pilotlight.engine.text.formats.answer_format import AnswerFormat
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from tests.engine.driver import Heard, draft_with, drain, load_engine, one, submit
from tests.engine.fake_drafter import EachAlone
from training.ember.chat import HERE

TOKENIZER = Tokenizer.from_directory(HERE)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(PERSON))
QUESTION = list(TOKENIZER.encode("Describe a person. "))


def asked(name: str, constraint: Constraint | None, seed: int = 0, **options: Any) -> Submit:
    settings = {"max_tokens": 120, "temperature": 1.5, "seed": seed, "ignore_eos": False} | options
    return replace(submit(name, QUESTION, **settings), constraint=constraint)


def ember(**options: Any) -> Engine:
    return load_engine(HERE, dtype="float32", **options)


def text_of(heard: Heard) -> str:
    return TOKENIZER.decode(heard.token_ids)


def assert_is_person(heard: Heard) -> None:
    assert (heard.finish_reason, heard.error) == ("stop", None)
    jsonschema.validate(json.loads(text_of(heard)), PERSON)


def crowd(engine: Engine) -> dict[str, Heard]:
    others = [
        asked("free", None, seed=5),
        asked("yes", Constraint("regex", "(yes|no), (sir|madam)"), seed=6),
        asked("red", Constraint("choice", '["red", "green"]'), seed=7),
        asked("sum", Constraint("lark", 'start: NUM "+" NUM\nNUM: /[0-9]{1,3}/'), seed=8, presence_penalty=1.0),
    ]
    return drain(engine, [*(asked(f"json{i}", JSON, seed=i, num_logprobs=1 if i else None) for i in range(4)), *others])


def test_every_answer_is_what_was_asked_for_and_a_neighbour_s_is_the_same_as_alone() -> None:
    engine = ember()
    heard = crowd(engine)
    for i in range(4):
        assert_is_person(heard[f"json{i}"])
    assert text_of(heard["yes"]) in {"yes, sir", "yes, madam", "no, sir", "no, madam"}
    assert text_of(heard["red"]) in {"red", "green"}
    left, plus, right = text_of(heard["sum"]).partition("+")
    assert (left.isdigit(), plus, right.isdigit()) == (True, "+", True)
    assert heard["free"] == one(engine, asked("free", None, seed=5))
    assert len({text_of(heard[f"json{i}"]) for i in range(4)}) > 1
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"depth": 2}, {"kv_tokens": 256}, {"max_num_seqs": 3, "depth": 2}], ids=str)
def test_tokens_are_the_same_however_steps_overlap_and_sequences_give_way(options: dict[str, Any]) -> None:
    plain, other = ember(), ember(**options)
    expected, found = crowd(plain), crowd(other)
    for name, heard in expected.items():
        assert (found[name].token_ids, found[name].finish_reason) == (heard.token_ids, heard.finish_reason), name
    plain.close()
    other.close()


def test_it_continues_after_delivered_tokens_as_if_it_had_not_been_cut() -> None:
    engine = ember()
    whole = one(engine, asked("whole", JSON, seed=3)).token_ids
    for cut in range(1, len(whole) - 1, 3):
        message = asked(f"cut{cut}", JSON, seed=3, max_tokens=120 - cut)
        message = replace(message, prompt_token_ids=(*message.prompt_token_ids, *whole[:cut]), num_delivered_tokens=cut)
        assert one(engine, message).token_ids == whole[cut:]
    engine.close()


def test_log_probabilities_are_the_model_s_own() -> None:
    engine = ember()
    answer = one(engine, asked("a", JSON, seed=2, num_logprobs=1))
    check = submit("b", QUESTION + answer.token_ids, max_tokens=1, prompt_logprobs=True)
    told = one(engine, check).prompt_logprobs
    assert told is not None
    model = [each.logprob for each in told[len(QUESTION) - 1 :]]
    assert [each.logprob for each in answer.logprobs] == pytest.approx(model, abs=1e-4)
    engine.close()


def test_a_cut_document_says_length_and_an_end_token_that_is_ignored_still_ends_a_whole_one() -> None:
    engine = ember()
    assert one(engine, asked("cut", JSON, max_tokens=4)).finish_reason == "length"
    number = one(engine, asked("number", Constraint("regex", "[0-9]{2}"), ignore_eos=True))
    assert (len(text_of(number)), number.finish_reason) == (2, "stop")
    words = one(engine, asked("words", Constraint("regex", "(ab)*"), ignore_eos=True, temperature=0.0, max_tokens=60))
    assert words.finish_reason in ("stop", "length")
    engine.close()


def test_what_cannot_be_enforced_ends_one_sequence_by_name_before_its_first_token() -> None:
    engine = ember()
    wrong = Constraint("json_schema", '{"not": {}}')
    heard = drain(engine, [asked("wrong", wrong), asked("right", JSON), asked("free", None, max_tokens=5)])
    assert (heard["wrong"].finish_reason, heard["wrong"].token_ids) == ("error", [])
    assert 'cannot be enforced: Unimplemented keys: ["not"]' in str(heard["wrong"].error)
    assert_is_person(heard["right"])
    assert heard["free"].finish_reason in ("length", "stop")
    engine.close()


class BrokenCompiler(GrammarCompiler):
    def compile(self, constraint: Constraint) -> Any:
        raise MemoryError("no room")


class FailingCompiler(GrammarCompiler):
    """A compiler whose matchers fail after they have made `masks_left` masks in all."""

    masks_left: float = 5

    def matcher(self, grammar: Any, *, is_optional: bool = False) -> Matcher:
        num_words = -(-TOKENIZER.vocab_size // 32)
        return FailingMatcher(self, grammar.deep_copy(), num_words, self.tokenizer(), is_optional=is_optional)


class FailingMatcher(Matcher):
    def __init__(self, compiler: FailingCompiler, *arguments: Any, is_optional: bool) -> None:
        super().__init__(*arguments, is_optional=is_optional)
        self.compiler = compiler

    def mask(self) -> Any:
        if not self.compiler.masks_left:
            raise ConstraintError("no token may follow the output so far")
        self.compiler.masks_left -= 1
        return super().mask()


CompilerT = TypeVar("CompilerT", bound=GrammarCompiler)


def compile_with(engine: Engine, kind: type[CompilerT]) -> CompilerT:
    """Let an engine that has no sequences compile its grammars with another compiler; return it."""
    compiler = kind(HERE, engine.info.vocab_size, engine.info.eos_token_ids)
    engine.requirements.token_masks.close()
    engine.requirements.token_masks = TokenMasks(engine.info, Grammars(compiler), engine.sequences)
    return compiler


def test_whatever_compiling_a_grammar_raises_ends_its_sequence_alone() -> None:
    engine = ember()
    compile_with(engine, BrokenCompiler)
    heard = drain(engine, [asked("a", JSON), asked("free", None, max_tokens=5)])
    assert (heard["a"].finish_reason, heard["a"].error) == ("error", "no room")
    assert heard["free"].finish_reason in ("length", "stop")
    engine.close()


def test_an_answer_that_nothing_may_follow_ends_alone() -> None:
    engine = ember()
    compiler = compile_with(engine, FailingCompiler)
    heard = drain(engine, [asked("a", JSON), asked("free", None, max_tokens=30)])
    assert heard["a"].finish_reason == "error"
    assert "no token may follow" in str(heard["a"].error)
    assert heard["free"].finish_reason in ("length", "stop")
    compiler.masks_left = math.inf
    assert_is_person(one(engine, asked("b", JSON)))
    engine.close()


def test_an_answer_that_can_do_without_its_grammar_is_what_it_would_have_been() -> None:
    engine = ember()
    free = one(engine, asked("free", None, max_tokens=30))
    wrong = Constraint("json_schema", '{"not": {}}', is_optional=True)
    heard = one(engine, asked("wrong", wrong, max_tokens=30))
    assert (heard.token_ids, heard.finish_reason, heard.error) == (free.token_ids, free.finish_reason, None)
    assert_is_person(one(engine, asked("right", replace(JSON, is_optional=True))))
    engine.close()


def test_an_answer_that_can_do_without_its_grammar_continues_when_that_fails() -> None:
    engine = ember()
    compile_with(engine, FailingCompiler)
    heard = one(engine, asked("a", replace(JSON, is_optional=True), max_tokens=40, ignore_eos=True))
    assert (len(heard.token_ids), heard.finish_reason, heard.error) == (40, "length", None)
    engine.close()


def test_a_call_that_is_not_required_has_no_key_that_its_tool_lacks() -> None:
    """The calls follow the schema although the model samples at random."""
    answers = AnswerFormat.of(TOKENIZER, ChatTemplate.from_directory(HERE))
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lisbon"]}}, "additionalProperties": False}
    rules = AnswerRules((CallableTool("weather", schema, is_lenient=True),), may_be_text=True)
    constraint = Constraint("lark", answers.grammar(Thinking.CLOSED, rules), is_optional=True)
    started = tuple(TOKENIZER.encode("<tool_call>"))
    engine = ember()
    asks = [
        replace(
            asked(f"call{seed}", constraint, seed=seed, max_tokens=60),
            prompt_token_ids=(*QUESTION, *started),
            num_delivered_tokens=len(started),
        )
        for seed in range(8)
    ]
    calls = set()
    for heard in drain(engine, asks).values():
        said = text_of(heard)
        assert "</tool_call>" in said, said
        calls.add(said.partition("</tool_call>")[0].strip())
    known = [{}, {"city": "Oslo"}, {"city": "Lisbon"}]
    assert all(json.loads(each) in [{"name": "weather", "arguments": a} for a in known] for each in calls)
    engine.close()


def test_one_that_waits_for_its_grammar_can_be_aborted_and_delays_no_other() -> None:
    engine = ember()
    engine.submit(asked("a", JSON))
    engine.sequences.abort("a")
    assert [output.finish_reason for output in engine.sequences.take_outputs()] == ["abort"]
    assert not engine.has_work
    assert_is_person(one(engine, asked("b", JSON)))
    engine.close()


class HalfRight(EachAlone):
    """A drafter that proposes tokens that a grammar sometimes forces, then forbidden ones."""

    def propose(self, sequence: Any, most: int) -> tuple[int, ...]:
        drafts = (*TOKENIZER.encode('{"name":'), *TOKENIZER.encode("zzz"))
        return tuple(drafts[len(sequence.token_ids) - sequence.num_prompt_tokens :][:most])


def test_drafts_are_checked_against_the_grammar_and_change_no_token() -> None:
    engine = ember()
    expected = crowd(engine)
    engine.close()
    drafting = ember()
    draft_with(drafting, HalfRight())
    for name, heard in crowd(drafting).items():
        assert heard.token_ids == expected[name].token_ids, name
    drafting.close()


def test_an_answer_does_not_end_before_it_has_the_tokens_it_was_to_have() -> None:
    engine = ember()
    question = [*TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")]
    free = replace(submit("a", question, max_tokens=90, ignore_eos=False), prompt_token_ids=tuple(question))
    short = one(engine, free)
    assert short.finish_reason == "stop"
    assert len(short.token_ids) < 60
    longer = replace(free, sampling=replace(free.sampling, min_tokens=60))
    long = one(engine, longer)
    assert 60 <= len(long.token_ids) <= 90
    assert long.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]
    cut = replace(longer, prompt_token_ids=(*question, *long.token_ids[:20]), num_delivered_tokens=20)
    cut = replace(cut, sampling=replace(cut.sampling, max_tokens=70))
    assert one(engine, cut).token_ids == long.token_ids[20:]
    number = Constraint("regex", "[0-9]{2}")
    both = one(engine, replace(asked("b", number), sampling=replace(asked("b", number).sampling, min_tokens=10)))
    assert (len(text_of(both)), both.finish_reason) == (2, "stop")  # a complete document ends in spite of min_tokens
    engine.close()
