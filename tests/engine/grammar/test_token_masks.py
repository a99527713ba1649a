"""Token masks for sequences whose grammar is late, cannot be enforced, or permits no further token."""

from concurrent.futures import Future

import pytest

from pilotlight.engine.api.protocol import Constraint, ModelInfo, SamplingParams, TokenOutput
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher
from pilotlight.engine.grammar.token_masks import AwaitedGrammar, TokenMasks
from pilotlight.engine.scheduling.plan import Chunk

INFO = ModelInfo("m", 64, 32, (0,), "float32", 4, 8, 1, 0.0)


def sequence(*, is_optional: bool) -> Sequence:
    return Sequence("s", [1, 2], SamplingParams(4), constraint=Constraint("regex", "a", is_optional=is_optional))


def after(taken: Sequence) -> tuple[list[Chunk], list[TokenOutput]]:
    """Return the chunk of the sequence if it continues, and its outputs if it ends."""
    sequences = OpenSequences(lambda sequence: None)
    sequences.add(taken)
    chunks = TokenMasks(INFO, None, sequences).enforceable([Chunk(taken, 0, 2, samples=True)])
    return chunks, sequences.take_outputs()


@pytest.mark.parametrize("is_optional", [False, True])
def test_a_sequence_whose_grammar_is_late_can_be_sent_again_and_never_continues_without_it(is_optional: bool) -> None:
    late, matcher = sequence(is_optional=is_optional), Future[Matcher]()
    awaited = AwaitedGrammar(late, matcher, 0.0)
    awaited.cancel()
    awaited.take()
    chunks, (output,) = after(late)
    assert (chunks, output.error_code) == ([], "overloaded")
    assert "try again" in str(output.error_message)


@pytest.mark.parametrize(("is_optional", "code"), [(False, "invalid_request"), (True, None)])
def test_a_grammar_that_cannot_be_enforced_ends_those_that_must_follow_it(is_optional: bool, code: str | None) -> None:
    wrong, matcher = sequence(is_optional=is_optional), Future[Matcher]()
    matcher.set_exception(ConstraintError("no such rule"))
    AwaitedGrammar(wrong, matcher, 0.0).take()
    chunks, outputs = after(wrong)
    assert len(chunks) == is_optional
    assert [(output.error_code, output.error_message) for output in outputs] == [(code, "no such rule")] * (
        not is_optional
    )


def test_an_answer_that_its_grammar_leaves_no_way_on_is_the_request_s_error() -> None:
    sequences, stuck = OpenSequences(lambda sequence: None), sequence(is_optional=False)
    sequences.add(stuck)
    sequences.leave_grammar(stuck, ConstraintError("lexer error: too many expressions constructed"))
    (output,) = sequences.take_outputs()
    assert (output.finish_reason, output.error_code) == ("error", "invalid_request")
    assert "too many expressions" in str(output.error_message)
