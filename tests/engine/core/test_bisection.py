"""A failed step is tried again by halves: only the sequence that causes the failure ends, and no other loses a token."""

import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Submit
from pilotlight.engine.api.step_journal import HeldSequences
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.bisection import Suspects
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.step import ChoiceRow
from pilotlight.engine.kv.pool.layout import STATE_WINDOW
from tests.engine.driver import Heard, submit
from tests.engine.fake_drafter import FakeDrafter
from tests.engine.fake_runner import (
    FakeForwarded,
    FakeLaunched,
    FakeRunner,
    expected_tokens,
    fake_engine,
    prompt_logprobs_of,
)

POISON = (666, 667)


def prompt_of(number: int) -> list[int]:
    return [number + 1, *range(2, 4 + number % 5)]


def run(engine: Engine, most_failures: int = 5) -> dict[str, Heard]:
    """Step like an engine host until there is no work; return the outputs of each sequence.

    Fail if `most_failures` steps fail in a row: a site would then replace the host.
    """
    heard: dict[str, Heard] = {}
    failed_in_a_row = 0
    for _ in range(2000):
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
        if not engine.has_work:
            break
        num_steps = engine.stats.num_steps
        try:
            engine.step()
            failed_in_a_row = 0 if engine.stats.num_steps > num_steps else failed_in_a_row
        except RuntimeError as error:
            failed_in_a_row += 1
            assert failed_in_a_row < most_failures, "a site would have replaced the host"
            engine.recover(f"a step failed: {error}")
    assert not engine.has_work
    engine.scheduler.pool.assert_consistent()
    assert engine.scheduler.pool.num_held == 0
    return heard


def engine_of(num_sequences: int, depth: int, **limits: Any) -> tuple[Engine, FakeRunner]:
    engine, runner = fake_engine(num_blocks=256, max_num_seqs=64, depth=depth, **limits)
    for i in range(num_sequences):
        engine.submit(submit(str(i), prompt_of(i), max_tokens=12))
    return engine, runner


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("others", [0, 1, 2, 7, 40])
def test_one_sequence_that_no_step_computes_ends_alone_and_the_others_have_their_tokens(
    others: int, depth: int
) -> None:
    engine, runner = engine_of(others, depth)
    for _ in range(4):  # the other sequences start to decode
        engine.step() if others else None
    engine.submit(submit("poison", [*POISON, 5], max_tokens=12))
    runner.poisons = {POISON}
    heard = run(engine)
    assert "it fails with this request alone" in (heard.pop("poison").error or "")
    assert {name: one.token_ids for name, one in heard.items()} == {
        str(i): expected_tokens(prompt_of(i), 12) for i in range(others)
    }
    assert all(one.finish_reason == "length" for one in heard.values())
    assert runner.num_failures <= 8, "halves are tried, not each sequence alone"


@pytest.mark.parametrize("depth", [1, 2])
def test_two_sequences_that_no_step_computes_end_and_the_device_is_not_taken_for_broken(depth: int) -> None:
    engine, runner = engine_of(4, depth)
    runner.poisons = {POISON}
    for name in ("p", "q"):
        engine.submit(submit(name, [*POISON, 5], max_tokens=12))
    heard = run(engine)
    assert {name for name, one in heard.items() if one.error} == {"p", "q"}
    assert all(heard[str(i)].token_ids == expected_tokens(prompt_of(i), 12) for i in range(4))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_that_does_not_repeat_ends_no_sequence(depth: int) -> None:
    engine, runner = engine_of(6, depth)
    engine.step()
    runner.explode = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    runner.explode = False
    engine.recover("a step failed")
    heard = run(engine)
    assert all(heard[str(i)].token_ids == expected_tokens(prompt_of(i), 12) for i in range(6))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_poison_in_the_middle_of_a_long_prompt_is_found(depth: int) -> None:
    engine, runner = engine_of(3, depth, max_num_batched_tokens=16)
    long = list(range(100, 160))
    runner.poisons = {tuple(long[:40])}
    engine.submit(submit("poison", long, max_tokens=4))
    heard = run(engine)
    assert {name for name, one in heard.items() if one.error} == {"poison"}
    assert all(heard[str(i)].token_ids == expected_tokens(prompt_of(i), 12) for i in range(3))


def test_penalties_count_each_token_once_after_a_failure() -> None:
    settings = {"max_tokens": 12, "frequency_penalty": 0.5}
    calm, _ = fake_engine()
    calm.submit(submit("a", prompt_of(1), **settings))
    expected = run(calm)["a"].token_ids
    engine, runner = fake_engine(depth=2)
    engine.submit(submit("a", prompt_of(1), **settings))
    for _ in range(5):
        engine.step()
    runner.explode = True
    with pytest.raises(RuntimeError):
        engine.step()
    runner.explode = False
    engine.recover("a step failed")
    assert [*run(engine)["a"].token_ids][-3:] == expected[-3:]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_and_whenever_the_others_have_the_tokens_that_they_have_alone(seed: int) -> None:
    """Schedules are random: some steps fail, with or without other steps in flight, and some sequences make each of their steps fail."""
    draw = random.Random(seed)
    depth, windows = draw.choice([1, 2]), draw.choice([(None,), (None, 5)])
    drafter = FakeDrafter(seed) if draw.random() < 0.5 else None
    engine, runner = fake_engine(
        num_blocks=draw.choice([24, 60]),
        max_num_batched_tokens=draw.choice([8, 16, 64]),
        depth=depth,
        windows=windows,
        speculation=drafter,
    )
    runner.poisons = {POISON}
    expected: dict[str, list[int]] = {}
    heard: dict[str, Heard] = {}
    for _ in range(3000):
        if len(expected) < 12 and draw.random() < 0.4:
            name, prompt = str(len(expected)), [draw.randrange(600) for _ in range(draw.randint(1, 30))]
            is_poison = draw.random() < 0.2
            expected[name] = [] if is_poison else expected_tokens(prompt, 8)
            message = submit(name, [*POISON, *prompt] if is_poison else prompt, max_tokens=8)
            engine.submit(replace(message, is_suspect=draw.random() < 0.1))
        runner.explode = draw.random() < 0.05
        try:
            engine.step()
        except RuntimeError as error:
            engine.recover(str(error))
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
        if len(expected) == 12 and not engine.has_work:
            break
    assert not engine.has_work
    for name, tokens in expected.items():
        one = heard[name]
        if tokens and one.error is None:
            assert one.token_ids == tokens
        else:  # this sequence caused the failures, or was in two failed steps by chance
            assert "it fails with this request alone" in (one.error or "")
    assert sum(one.error is not None for one in heard.values()) <= 2 + sum(not tokens for tokens in expected.values())
    engine.scheduler.pool.assert_consistent()
    assert engine.scheduler.pool.num_held == 0


def suspected(name: str) -> Submit:
    return replace(submit(name, [*POISON, 5, 6, 7, 8], max_tokens=6), is_suspect=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_a_host_died_under_shares_no_step_until_its_prompt_is_computed(depth: int) -> None:
    engine, _ = engine_of(5, depth)
    engine.step()
    engine.submit(suspected("suspect"))
    held: list[HeldSequences] = []
    heard: dict[str, Heard] = {}
    while engine.has_work:
        engine.step(held.append)
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
    apart = [step.computed for step in held if "suspect" in step.computed]
    assert apart[0] == ("suspect",)
    assert len(apart[1]) > 1, "its prompt is computed, so it decodes together with the others"
    assert heard["suspect"].token_ids == expected_tokens([*POISON, 5, 6, 7, 8], 6)
    assert all(heard[str(i)].token_ids == expected_tokens(prompt_of(i), 12) for i in range(5))


def test_a_suspect_that_fails_at_once_is_to_blame_without_another_try() -> None:
    engine, runner = engine_of(3, 1)
    runner.poisons = {POISON}
    engine.submit(suspected("suspect"))
    heard = run(engine)
    assert runner.num_failures == 1
    assert {name for name, one in heard.items() if one.error} == {"suspect"}


class Unpublishable:
    """A fact about a token that cannot be read."""

    def __bool__(self) -> bool:
        raise KeyError("a token that is not in the table")


class UnpublishableRunner(FakeRunner):
    """A runner whose tokens of the sequence "1" cannot be published."""

    def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> FakeLaunched:
        result, bad = super().choose(forwarded, rows).collect(), tuple(prompt_of(1))
        tokens = [
            replace(token, is_finite=Unpublishable()) if forwarded.contexts[row.row][: len(bad)] == bad else token
            for row, token in zip(rows, result.tokens, strict=True)
        ]
        return FakeLaunched(result._replace(tokens=tokens))


def test_the_results_of_one_sequence_that_cannot_be_published_end_it_alone() -> None:
    engine, _ = engine_of(3, 1, runner_type=UnpublishableRunner)
    heard = run(engine)
    assert {name for name, one in heard.items() if one.error} == {"1"}
    assert all(heard[name].token_ids == expected_tokens(prompt_of(int(name)), 12) for name in ("0", "2"))


def test_the_halves_of_a_failed_step_and_the_others_take_turns() -> None:
    a, b, c, other = (Sequence(name, [1, 2], submit(name, [1, 2]).sampling) for name in "abco")
    suspects = Suspects()
    assert suspects.note_failure({a: 2, b: 2, c: 2}) is None
    first = [(turn.group is None, [one for one in (a, b, c, other) if turn.may_run(one)]) for turn in suspects.turns()]
    assert first == [(False, [a, b]), (False, [c]), (True, [other])]
    assert next(suspects.turns()).may_run(a), "the turns begin again with the suspects"
    assert suspects.note_failure({a: 2, b: 2}) is None
    assert next(suspects.turns()).may_run(other)
    turn = next(suspects.turns())
    assert turn.may_run(c), "the rest of the first failure is tried before the halves of the second"
    c.num_completed_tokens = 2
    suspects.note_success()
    next(suspects.turns())
    assert next(suspects.turns()).may_run(a)
    assert suspects.note_failure({a: 2}) is a
    suspects.discard(b)
    assert not suspects
    assert suspects.note_failure({other: 2}) is None, "a new failure starts a new search"


@pytest.mark.parametrize("depth", [1, 2])
def test_states_that_a_failed_step_has_changed_are_computed_anew_from_the_end_of_a_block(depth: int) -> None:
    engine, runner = fake_engine(
        num_blocks=256, max_num_seqs=64, depth=depth, windows=(None, STATE_WINDOW), has_states=True
    )
    for i in range(5):
        engine.submit(submit(str(i), prompt_of(i), max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.submit(submit("poison", [*POISON, 5], max_tokens=12))
    runner.poisons = {POISON}
    heard = run(engine)
    assert "it fails with this request alone" in (heard.pop("poison").error or "")
    assert {name: one.token_ids for name, one in heard.items()} == {
        str(i): expected_tokens(prompt_of(i), 12) for i in range(5)
    }


def test_a_prompt_whose_states_are_computed_anew_reports_each_token_once() -> None:
    engine, runner = fake_engine(num_blocks=64, max_num_batched_tokens=6, windows=(None, STATE_WINDOW), has_states=True)
    prompt = list(range(50, 70))
    engine.submit(submit("a", prompt, max_tokens=3, prompt_logprobs=True))
    engine.step()
    runner.explode = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    runner.explode = False
    engine.recover("a step failed")
    assert run(engine)["a"].prompt_logprobs == prompt_logprobs_of(prompt)
