"""Drafts from a grammar: the tokens that it forces, with the vocabulary of the embedded model."""

import json
from collections.abc import Iterator

import pytest

from pilotlight.engine.api.protocol import Constraint, SamplingParams
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter_registry import GrammarDrafter
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import Matcher
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from training.ember.chat import HERE

pytest.importorskip("llguidance")  # the grammar compiler needs it

TOKENIZER = Tokenizer.from_directory(HERE)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(GrammarCompiler(HERE, 2048, (TOKENIZER.encode("<|im_end|>")[0],)))
    yield made
    made.close()


def matcher(grammars: Grammars, constraint: Constraint, before: str = "") -> Matcher:
    return grammars.compile(constraint, TOKENIZER.encode(before)).result(timeout=60)


def forced(found: Matcher, ahead: str = "", most: int = 15) -> str:
    tokens, is_forced = found.foreseen(TOKENIZER.encode(ahead), most)
    return TOKENIZER.decode(tuple(tokens)) if is_forced else ""


JSON = Constraint("json_schema", json.dumps(SCHEMA))


def test_names_and_punctuation_are_forced_and_values_are_not(grammars: Grammars) -> None:
    assert forced(matcher(grammars, JSON)) == '{"name": "'
    assert forced(matcher(grammars, JSON, '{"name": "Bo')) == ""
    assert forced(matcher(grammars, JSON, '{"name": "Bob", "')) == 'age": '


def test_what_follows_a_guess_is_found_and_the_sequence_stays_where_it_was(grammars: Grammars) -> None:
    found = matcher(grammars, JSON)
    before = found.mask()
    assert forced(found, ahead='{"name": "Bob", "') == 'age": '
    assert forced(found, ahead='{"game') == ""
    assert forced(found, most=0) == ""
    assert found.mask() == before
    assert forced(found) == '{"name": "'


def test_what_only_white_space_may_stand_before_is_likely(grammars: Grammars) -> None:
    def likely(before: str, ahead: str = "") -> str:
        tokens, is_forced = matcher(grammars, JSON, before).foreseen(TOKENIZER.encode(ahead), 5)
        return "" if is_forced else TOKENIZER.decode(tuple(tokens))

    assert likely('{"name": "Bob"') == ', "'
    assert likely('{"name": "', ahead='Bob"') == ', "'
    assert likely('{"name": "Bo') == "", "any text"
    assert likely('{"name": "Bob", "age": 1') == "", "another digit or the end may follow"
    assert likely('{"name": "Bob", "age": 12}') == "", "nothing follows"
    assert likely('{"name": "Bob"', ahead="}") == "", "the grammar forbids the tokens ahead"
    sequence = Sequence("s", [1, 2, 3], SamplingParams(max_tokens=9), b"")
    sequence.matcher = matcher(grammars, JSON, '{"name": "Bob"')
    found = GrammarDrafter().propose(sequence, (), 5)
    assert found is not None
    assert found.kind != "grammar", "its acceptance rate is counted separately"


def test_no_more_than_requested_and_nothing_after_the_end(grammars: Grammars) -> None:
    choice = Constraint("choice", '["a very long answer that is the only one there is"]')
    found = matcher(grammars, choice)
    assert len(found.foreseen((), 3)[0]) == 3
    whole, _ = found.foreseen((), 60)
    assert TOKENIZER.decode(tuple(whole)) == "a very long answer that is the only one there is"
    for token_id in whole:
        found.accept(token_id)
    assert found.is_complete
    assert found.foreseen((), 5)[0] == []
    assert found.num_allowed(whole) == 0


def test_it_is_counted_how_many_drafts_the_grammar_allows(grammars: Grammars) -> None:
    found = matcher(grammars, JSON)
    right, wrong = TOKENIZER.encode('{"name": "Bob'), TOKENIZER.encode('{"name": }')
    assert found.num_allowed(right) == len(right)
    assert found.num_allowed(wrong) == len(wrong) - 1
    assert forced(found) == '{"name": "', "the matcher must not advance"


def test_a_sequence_without_a_grammar_has_no_drafts_of_one(grammars: Grammars) -> None:
    sequence = Sequence("s", [1, 2, 3], SamplingParams(max_tokens=9), b"")
    assert GrammarDrafter().propose(sequence, (), 5) is None
    sequence.matcher = matcher(grammars, JSON)
    found = GrammarDrafter().propose(sequence, (), 5)
    assert found is not None
    assert TOKENIZER.decode(tuple(found.token_ids)) == '{"name": "'
