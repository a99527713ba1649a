"""Steps in flight, with a runner that only records its calls: which rows sample, which sequences get the tokens, and the input of the next step."""

import time
from array import array
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.in_flight import InFlightSteps
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.core.step import ChoiceRow, RunResult, SampledToken, StepInput
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk

SIZE = 4


class Launched:
    """A launched step that chooses, in each row, the token 100 * step + row."""

    def __init__(self, runner: "Runner", rows: SequenceOf[ChoiceRow]) -> None:
        self.runner, self.rows, self.is_collected = runner, rows, False
        self.step = len(runner.launched)

    def collect(self) -> RunResult:
        assert not self.is_collected
        self.is_collected = True
        return RunResult([SampledToken(100 * self.step + row.row, True) for row in self.rows], {}, {}, 0.0)


class Runner:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.steps: list[StepInput] = []
        self.launched: list[Launched] = []

    def forward(self, step: StepInput) -> Any:
        self.steps.append(step)
        return step

    def choose(self, forwarded: Any, rows: SequenceOf[ChoiceRow]) -> Launched:
        assert forwarded is self.steps[-1]
        self.launched.append(Launched(self, rows))
        return self.launched[-1]

    def scrub(self, blocks: SequenceOf[int]) -> None: ...

    def reset(self) -> None: ...


def sequence(name: str, num_tokens: int, computed: int, first_block: int = 0, **sampling: float) -> Sequence:
    made = Sequence(name, [7] * num_tokens, SamplingParams(9, **sampling), b"", num_computed_tokens=computed)
    blocks = range(first_block, first_block + 4)
    made.tables = [BlockTable(blocks, [0] * 4)]
    return made


def test_each_current_chunk_samples_after_its_tokens_and_after_each_of_its_drafts() -> None:
    runner = Runner(1)
    steps = InFlightSteps(runner, SIZE, time.perf_counter)
    drafting = sequence("drafting", 6, 5)
    counted = sequence("counted", 4, 3, 4, presence_penalty=1.0)
    ended = sequence("ended", 4, 3, 8)
    masked = sequence("masked", 5, 4, 12)
    whole, part = sequence("whole", 3, 0, 16), sequence("part", 9, 0, 20)
    chunks = [
        Chunk.next_of(drafting, 1, (8, 9)),
        Chunk.next_of(counted, 1),
        Chunk.next_of(ended, 1),
        Chunk.next_of(masked, 1, (5,)),
        Chunk.next_of(part, 4),
        Chunk.next_of(whole, 3),
    ]
    ended.epoch += 1
    masks = {masked: [array("i", [1]), array("i", [2])]}
    forwarded = steps.forward(chunks, frozenset())
    assert (len(steps), forwarded.num_decodes, forwarded.chunks) == (0, 4, chunks)
    steps.choose(forwarded, masks)
    rows = runner.launched[0].rows
    assert [(row.row, row.position) for row in rows] == [(0, 6), (1, 7), (2, 8), (3, 4), (5, 5), (6, 6), (7, 3)]
    assert [row.sampling for row in rows] == [drafting.sampling] * 3 + [counted.sampling] + [masked.sampling] * 2 + [
        whole.sampling
    ]
    assert [None if row.mask is None else list(row.mask) for row in rows] == [None] * 4 + [[1], [2], None]
    assert [None if row.counts is None else list(row.counts.num_outputs) for row in rows] == [None] * 3 + [[]] + [
        None
    ] * 3
    assert len(steps) == 1
    collected = steps.collect()
    assert [[token.token_id for token in tokens] for tokens in collected.tokens] == [
        [0, 1, 2],
        [3],
        [],
        [5, 6],
        [],
        [7],
    ]
    assert (collected.num_tokens, collected.num_drafts, collected.num_prompt_tokens) == (3 + 1 + 1 + 2 + 4 + 3, 3, 7)
    assert (collected.chunks, collected.num_decodes, len(steps)) == (chunks, 4, 0)


def test_penalties_after_a_draft_count_the_drafts_before_it() -> None:
    runner = Runner(1)
    steps = InFlightSteps(runner, SIZE, time.perf_counter)
    counted = sequence("counted", 4, 0, presence_penalty=1.0)
    counted.token_ids += [3, 3]
    counted.num_computed_tokens = 5
    steps.choose(steps.forward([Chunk.next_of(counted, 1, (4, 3))], frozenset()))
    entries = [row.counts for row in runner.launched[0].rows]
    told = [dict(zip(each.token_ids, each.num_outputs, strict=True)) for each in entries if each is not None]
    assert told == [{3: 2}, {3: 2, 4: 1}, {3: 3, 4: 1}]


@pytest.mark.parametrize(("depth", "most", "feeds"), [(1, 0, False), (2, 1, True), (3, 2, False)])
def test_a_runner_has_so_many_steps_under_way_and_two_feed_each_other(depth: int, most: int, feeds: bool) -> None:
    runner = Runner(depth)
    steps = InFlightSteps(runner, SIZE, time.perf_counter)
    assert steps.feeds_next == feeds
    assert steps.is_full == (most == 0)
    for number in range(most):
        one = sequence(str(number), 3, 0, 4 * number)
        steps.choose(steps.forward([Chunk.next_of(one, 3)], frozenset()))
        assert steps.is_full == (number + 1 == most)
    assert len(steps) == most
    steps.wait()
    assert len(steps) == 0
    assert all(each.is_collected for each in runner.launched)


def test_a_token_that_is_not_known_yet_is_fed_from_the_row_that_chooses_it() -> None:
    runner = Runner(2)
    steps = InFlightSteps(runner, SIZE, time.perf_counter)
    part, first, second = sequence("part", 9, 0), sequence("first", 3, 0, 4), sequence("second", 5, 4, 8)
    chunks = [Chunk.next_of(second, 1), Chunk.next_of(part, 4), Chunk.next_of(first, 3)]
    steps.choose(steps.forward(chunks, frozenset()))
    for chunk in chunks:
        chunk.sequence.num_computed_tokens = chunk.end
        if chunk.samples:
            chunk.sequence.token_ids.append(PENDING)
    following = [Chunk.next_of(first, 1), Chunk.next_of(second, 1), Chunk.next_of(part, 4)]
    steps.choose(steps.forward(following, frozenset()))
    assert runner.steps[1].feeds == ((0, 1), (1, 0)), "the rows get the second and the first token of the previous step"
    assert [len(runner.steps[0].feeds), len(steps)] == [0, 2]
    assert [token.token_id for tokens in steps.collect().tokens for token in tokens] == [0, 1]
    assert [token.token_id for tokens in steps.collect().tokens for token in tokens] == [100, 101]


def test_steps_that_are_not_wanted_are_not_waited_for() -> None:
    runner = Runner(3)
    steps = InFlightSteps(runner, SIZE, time.perf_counter)
    for number in range(2):
        steps.choose(steps.forward([Chunk.next_of(sequence(str(number), 3, 0, 4 * number), 3)], frozenset()))
    steps.drop()
    assert len(steps) == 0
    assert not any(each.is_collected for each in runner.launched)
