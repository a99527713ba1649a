"""The speculator: each drafter continues the proposal of the previous one, drafts that pay are verified, and a faulty drafter is disabled."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from pilotlight.engine.api.protocol import DraftCounts, SamplingParams
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.drafting.costs import StepCosts
from pilotlight.engine.drafting.drafter import Draft
from pilotlight.engine.drafting.speculator import MOST_DRAFTS, Speculator
from pilotlight.engine.scheduling.plan import Chunk, StepCount, StepPlan
from tests.clock import Clock
from tests.engine.drafting.test_budget import FREE, LINEAR, READS
from tests.engine.driver import Welcome


class FakeDrafter:
    def __init__(self, propose: Callable[[list[int], int], Any], name: str = "fake") -> None:
        self.name = name
        self._propose = propose
        self.asked: list[tuple[int, ...]] = []
        self.forgotten: list[Sequence] = []

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        self.asked.append(tuple(ahead))
        found = self._propose(list(ahead), most)
        return None if found is None else Draft(found, self.name, 0.9)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


def speculator(
    *drafters: FakeDrafter, costs: StepCosts = FREE, clock: Clock | None = None, model: Any = None
) -> Speculator:
    made = Speculator(drafters, vocab_size=1000, clock=clock or Clock(), model=model)
    made.costs, made.gain = costs, Welcome()
    return made


def sequence(*token_ids: int) -> Sequence:
    ids = [1, 2, *token_ids]
    made = Sequence("s", ids, SamplingParams(max_tokens=99), b"", num_computed_tokens=len(ids) - 1)
    made.length_limit = 100
    return made


def drafts(made: Speculator, of: Sequence, room: int = 50, budget: int = 50) -> tuple[int, ...]:
    of.length_limit = len(of.token_ids) + 1 + room
    return made.drafts(plan_of(of, budget=budget)).get(of, ())


def plan_of(*sequences: Sequence, budget: int) -> StepPlan:
    plan = StepPlan(budget + len(sequences))
    for each in sequences:
        plan.add(each, 1)
    return plan


def counting(ahead: list[int], most: int) -> list[int]:
    return list(range(len(ahead), len(ahead) + most))


def test_each_follows_the_other_in_turns() -> None:
    forced = FakeDrafter(lambda ahead, most: [7, 8] if len(ahead) in (0, 5) else None, "forced")
    copied = FakeDrafter(lambda ahead, most: [1, 2, 3][:most], "copied")
    made = speculator(forced, copied)
    assert drafts(made, sequence(), room=9) == (7, 8, 1, 2, 3, 7, 8, 1, 2)
    assert copied.asked == [(7, 8), (7, 8, 1, 2, 3, 7, 8)]


@pytest.mark.parametrize(
    ("room", "budget", "expected"), [(50, 50, MOST_DRAFTS), (3, 50, 3), (50, 2, 2), (0, 9, 0), (-1, 9, 0)]
)
def test_there_are_never_more_than_there_is_room_for(room: int, budget: int, expected: int) -> None:
    assert len(drafts(speculator(FakeDrafter(counting)), sequence(), room, budget)) == expected


def test_what_a_grammar_forbids_is_no_draft() -> None:
    class Matcher:
        def num_allowed(self, tokens: SequenceOf[int]) -> int:
            return sum(token < 3 for token in tokens)

    bound = sequence()
    bound.matcher = Matcher()
    assert drafts(speculator(FakeDrafter(counting)), bound, room=9) == (0, 1, 2)


def test_a_model_guesses_no_more_than_the_step_has_room_for() -> None:
    model, several = FakeModel(), [sequence(i) for i in range(3)]
    found = speculator(model=model).drafts(plan_of(*several, budget=7))
    assert model.asked == [(several, 2)]
    assert sum(map(len, found.values())) == 6


def test_a_budget_is_one_for_all() -> None:
    made, several = speculator(FakeDrafter(counting)), [sequence(i) for i in range(3)]
    assert sum(map(len, made.drafts(plan_of(*several, budget=20)).values())) == 20


def test_after_an_unknown_token_the_first_guess_is_no_draft() -> None:
    assert drafts(speculator(FakeDrafter(counting)), sequence(PENDING), room=4) == (1, 2, 3, 4)


def test_drafts_after_a_wrong_one_do_not_count_for_their_kind() -> None:
    made = speculator(
        FakeDrafter(lambda ahead, most: None if ahead else [7], "first"),
        FakeDrafter(lambda ahead, most: [8] if len(ahead) == 1 else None, "second"),
    )
    checked = sequence()
    found = drafts(made, checked)
    assert found == (7, 8)
    made.note(Chunk(checked, 1, 2, True, drafts=found), 0)
    assert made.rates.rate("first", 0.9) < 0.9
    assert made.rates.rate("second", 0.9) == 0.9


@pytest.mark.parametrize(
    ("propose", "why"),
    [
        (lambda ahead, most: 1 // 0, "division"),
        (lambda ahead, most: [5] * (most + 1), "were requested"),
        (lambda ahead, most: [], "returned 0 drafts"),
        (lambda ahead, most: [1000], "1000 is not one of"),
        (lambda ahead, most: [3, -1], "-1 is not one of"),
        (lambda ahead, most: ["x"], "not supported"),
        (lambda ahead, most: 3, "has no len"),
    ],
)
def test_one_that_raises_or_proposes_nonsense_is_not_asked_again_for_that_sequence(
    propose: Callable[[list[int], int], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = FakeDrafter(propose, "broken"), FakeDrafter(counting, "sound")
    made, one, other = speculator(broken, sound), sequence(), sequence()
    with caplog.at_level(logging.WARNING):
        assert drafts(made, one, room=3) == drafts(made, one, room=3) == (0, 1, 2)
    assert len(broken.asked) == 1
    assert made.counts.num_failures == 1
    assert why in caplog.text
    drafts(made, other)
    assert len(broken.asked) == 2


def test_one_that_is_slower_than_the_steps_is_not_asked_again_and_a_slow_first_look_is_forgiven() -> None:
    clock = Clock()

    def slow(ahead: list[int], most: int) -> list[int]:
        clock.now += 0.2 if clock.now == 0.0 else 0.021
        return counting(ahead, most)

    steps = StepCosts()
    for _ in range(8):
        steps.count(1, 0.02)
    drafter = FakeDrafter(slow)
    made, one = speculator(drafter, costs=steps, clock=clock), sequence()
    found = [len(drafts(made, one)) for _ in range(100)]
    assert found[0] > 0
    assert made.counts.num_failures == 1
    assert 20 < len(drafter.asked) < 100
    assert found[-1] == 0


def note(made: Speculator, of: Sequence, proposed: tuple[int, ...], num_accepted: int) -> None:
    made.note(Chunk(of, 1, 2, True, drafts=proposed), num_accepted)


def test_drafts_that_are_refused_again_and_again_are_not_checked_until_they_may_be_right_again() -> None:
    made, one = speculator(FakeDrafter(counting), costs=READS), sequence()
    checked = []
    for _ in range(400):
        proposed = drafts(made, one)
        checked.append(len(proposed))
        if proposed:
            note(made, one, proposed, 0)
    assert checked[0] > 3
    assert sum(checked[20:]) < 40
    assert any(checked[100:]), "it is still tried sometimes"


def test_drafts_that_are_right_become_more() -> None:
    made, one = speculator(FakeDrafter(lambda ahead, most: counting(ahead, most)), costs=READS), sequence()
    first = drafts(made, one)
    for _ in range(20):
        note(made, one, proposed := drafts(made, one), len(proposed))
    assert len(drafts(made, one)) == MOST_DRAFTS >= len(first)


def test_counts_contain_the_outcome_of_drafts_by_position() -> None:
    made, one = speculator(FakeDrafter(counting)), sequence()
    for accepted in (3, 1, 0):
        note(made, one, drafts(made, one, room=3), accepted)
    assert made.counts == DraftCounts(3, 9, 4, (2, 1, 1), 0)


def test_looking_becomes_rare_where_it_takes_long_and_finds_nothing() -> None:
    clock = Clock()

    def looks(ahead: list[int], most: int) -> None:
        clock.now += 0.05  # seconds; a step takes about one

    drafter = FakeDrafter(looks)
    made, one = speculator(drafter, costs=READS, clock=clock), sequence()
    for _ in range(200):
        drafts(made, one)
    assert len(drafter.asked) > 190, "a search takes less than 1 % of a step of eleven seconds"
    made.costs = FREE
    for _ in range(300):
        drafts(made, one)
    assert len(drafter.asked) < 270


def test_a_sequence_whose_drafts_come_now_and_then_is_looked_at_in_every_step() -> None:
    """JSON by a schema has such drafts: after six tokens of a value the next name is forced."""
    clock, num_steps, num_drafting = Clock(), 0, 0

    def looks(ahead: list[int], most: int) -> list[int] | None:
        clock.now += 0.05
        return [5, 6, 7][:most] if num_steps % 7 == 0 and not ahead else None

    made, one = speculator(FakeDrafter(looks), costs=FREE, clock=clock), sequence()
    for _ in range(210):
        num_steps += 1
        found = drafts(made, one)
        if found:
            num_drafting += 1
            note(made, one, found, len(found))
    assert num_drafting >= 28, "of 30"


def test_the_first_steps_of_a_size_which_are_recorded_are_no_loss_for_that() -> None:
    def counted(tokens_of_first: int) -> Speculator:
        made = Speculator([], vocab_size=1000)
        for _ in range(20):
            made.count_step(StepCount(1, 0, 1, 1, 0.001))
        for rows in range(2, 12):
            for step_s in (0.02, 0.02, 0.02, 0.02, 0.02, 0.0013):
                made.count_step(StepCount(rows, rows - 1, 1, tokens_of_first, step_s))
        return made

    made = counted(2)
    assert made.gain.may_draft(1), "once recorded, a step of two rows takes hardly longer than one of one row"
    for _ in range(20):
        made.count_step(StepCount(4, 3, 1, 2, 0.02))
    assert not made.gain.may_draft(1)
    assert not counted(1).gain.may_draft(1), "these drafts gained nothing"


def test_a_large_batch_is_left_alone_for_some_steps_where_nothing_is_found() -> None:
    drafter = FakeDrafter(lambda ahead, most: None)
    made, many = speculator(drafter), [sequence(i) for i in range(64)]
    for _ in range(50):
        assert made.drafts(plan_of(*many, budget=500)) == {}
    assert len(drafter.asked) == 64 * 6


def test_nothing_is_proposed_before_a_step_was_measured_nor_where_no_row_pays() -> None:
    drafter = FakeDrafter(counting)
    assert drafts(speculator(drafter, costs=StepCosts()), sequence()) == ()
    assert not drafter.asked
    assert drafts(speculator(drafter, costs=LINEAR), sequence()) == ()


def test_nothing_is_kept_of_a_sequence_that_has_ended() -> None:
    drafter, one = FakeDrafter(counting), sequence()
    made = speculator(drafter)
    proposed = drafts(made, one)
    made.forget(one)
    made.forget(one)
    assert drafter.forgotten == [one]
    note(made, one, proposed, 2)
    assert made.counts.num_drafts == 0


class FakeModel:
    """A draft model that guesses 100, 101 and so on by default, and reports `guess_s` as its time."""

    name, prior = "fake model", 0.8

    def __init__(self, guess_s: float = 0.0, guess: Callable[[int], list[int]] | None = None) -> None:
        self.guess_s = guess_s
        self.guess = guess or (lambda length: list(range(100, 100 + length)))
        self.asked: list[tuple[list[Sequence], int]] = []

    def predict_s(self, num_sequences: int) -> float:
        return self.guess_s

    def propose(self, sequences: list[Sequence], length: int) -> list[list[int]]:
        self.asked.append((sequences, length))
        return [self.guess(length) for _ in sequences]


def test_a_model_is_asked_at_once_of_all_that_the_others_have_nothing_for() -> None:
    copied, free, pending = sequence(1), sequence(2), sequence(PENDING)
    finds = FakeDrafter(lambda ahead, most: [7, 8, 9][:most])
    finds.propose = lambda of, ahead, most: Draft([7, 8], "fake", 0.9) if of is copied and not ahead else None
    model = FakeModel()
    made = speculator(finds, model=model)
    found = made.drafts(plan_of(copied, free, pending, budget=50))
    ((asked, length),) = model.asked
    assert asked == [free, pending]
    assert found[copied] == (7, 8)
    assert found[free] == tuple(range(100, 100 + length - 1))
    assert found[pending] == tuple(range(101, 100 + length)), "the first guess replaces the token that is not known"


def test_a_model_guesses_no_more_than_pays() -> None:
    (of,) = ([sequence()],)
    assert speculator(model=(cheap := FakeModel())).drafts(plan_of(*of, budget=50))
    slow = FakeModel(guess_s=1e3)
    assert not speculator(model=slow).drafts(plan_of(*of, budget=50))
    assert not slow.asked
    assert cheap.asked


def test_a_model_guesses_into_blocks_that_the_sequence_holds() -> None:
    first, second = sequence(1), sequence(2)
    plan = plan_of(first, second, budget=50)
    plan.reserve = lambda of, end: of is first
    model = FakeModel()
    assert speculator(model=model).drafts(plan).keys() == {first}
    assert model.asked[0][0] == [first]


@pytest.mark.parametrize(
    ("guess", "why"),
    [
        (lambda length: 1 / 0, "division"),
        (lambda length: [1000] * length, "1000 is not one of 1000 tokens"),
        (lambda length: [1] * (length + 1), "were requested"),
    ],
    ids=["raises", "no tokens", "too many"],
)
def test_a_model_that_breaks_is_not_asked_again_for_those_sequences(
    guess: Callable[[int], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, of = FakeModel(guess=guess), sequence()
    made = speculator(model=model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not made.drafts(plan_of(of, budget=50))
    assert why in caplog.text
    assert len(model.asked) == 1
    assert made.counts.num_failures == 1
    made.drafts(plan_of(sequence(5), budget=50))
    assert len(model.asked) == 2, "the drafter stays enabled for other sequences"
