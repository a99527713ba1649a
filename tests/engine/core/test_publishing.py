"""Publishing the results of a step: embeddings, NaN and infinity, and token counts."""

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from pilotlight.engine.api.protocol import TokenOutput
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.step import ChoiceRow, RunResult, StepInput
from tests.engine.core.test_engine import PROMPT
from tests.engine.driver import drain, one, submit
from tests.engine.fake_drafter import FakeDrafter
from tests.engine.fake_runner import FakeForwarded, FakeLaunched, FakeRunner, expected_tokens, fake_engine


class EmbeddingRunner(FakeRunner):
    """A runner of an embedding model: the last chunks of prompts get `values` as embeddings."""

    values: tuple[float, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wanted: list[list[int]] = []

    def forward(self, step: StepInput) -> FakeForwarded:
        self.wanted.append([pooled.chunk for pooled in step.pooling if pooled.is_last])
        return super().forward(step)

    def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> FakeLaunched:
        assert not rows, "an embedding chooses no token"
        return FakeLaunched(RunResult([], {}, dict.fromkeys(self.wanted.pop(), self.values), 0.0))


def embedding_engine(*values: float, **limits: Any) -> tuple[Engine, FakeRunner]:
    engine, runner = fake_engine(runner_type=EmbeddingRunner, **limits)
    assert isinstance(runner, EmbeddingRunner)
    runner.values = values
    engine.info = replace(engine.info, pooling="mean")
    return engine, runner


def test_an_embedding_is_the_one_output_of_its_sequence() -> None:
    engine, runner = embedding_engine(1.0, -2.5, max_num_batched_tokens=4)
    heard = drain(engine, [submit(name, PROMPT, pooling="mean") for name in "ab"])
    for each in heard.values():
        assert (each.embedding, each.finish_reason, each.token_ids, each.num_outputs) == ((1.0, -2.5), "stop", [], 1)
    load = engine.load()
    assert (load.prompt_tokens, load.output_tokens) == (2 * len(PROMPT), 0)
    assert runner.scrubbed == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hidden_states_that_are_not_finite_end_their_text_and_are_wiped_out(bad: float) -> None:
    engine, runner = embedding_engine(1.0, bad)
    heard = one(engine, submit("a", PROMPT, pooling="mean"))
    assert (heard.finish_reason, heard.embedding) == ("error", None)
    assert "hidden states were not finite" in (heard.error or "")
    assert len(runner.scrubbed) == 2
    assert engine.load().prompt_tokens == 0


def outputs(engine: Engine, *names: str, **sampling: Any) -> dict[str, list[TokenOutput]]:
    """Submit one prompt under each name; return the outputs for each name, in order."""
    told: dict[str, list[TokenOutput]] = {name: [] for name in names}
    for name in names:
        engine.submit(submit(name, PROMPT, **sampling))
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            told[output.sequence_id].append(output)
    return told


def test_one_time_facts_come_with_the_first_output() -> None:
    ticks = iter(range(10_000))
    engine, _ = fake_engine(clock=lambda: float(next(ticks)))
    one(engine, submit("before", PROMPT, max_tokens=1))
    (told,) = outputs(engine, "a", max_tokens=3, num_logprobs=0).values()
    assert [each.num_cached_tokens for each in told] == [4, None, None]
    assert told[0].queue_us > 0
    assert [each.queue_us for each in told[1:]] == [0, 0]
    assert [len(each.logprobs or ()) for each in told] == [1, 1, 1]
    assert [each.finish_reason for each in told] == [None, None, "length"]
    assert engine.load().prompt_tokens == len(PROMPT) + len(PROMPT) - 4
    (told,) = outputs(engine, "b", max_tokens=2, prompt_logprobs=True).values()
    assert [each.prompt_logprobs is not None for each in told] == [True, False]
    assert len(told[0].prompt_logprobs or ()) == len(PROMPT) - 1
    assert [each.num_cached_tokens for each in told] == [0, None]
    assert [each.logprobs for each in told] == [None, None]


def test_a_prompt_that_is_computed_in_parts_counts_once_and_answers_not_among_it() -> None:
    engine, _ = fake_engine(max_num_batched_tokens=4)
    heard = one(engine, submit("a", PROMPT, max_tokens=5))
    assert heard.token_ids == expected_tokens(PROMPT, 5)
    assert (engine.load().prompt_tokens, engine.load().output_tokens) == (len(PROMPT), 5)


def test_a_prompt_that_is_computed_again_counts_again_and_its_answer_does_not() -> None:
    engine, _ = fake_engine()
    engine.submit(submit("a", PROMPT, max_tokens=9))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler.pool.forget(sequence.tables[0].held)
    assert engine.scheduler.preemption.preempt_youngest(keep_oldest=False)
    drain(engine, [], heard={})
    assert (engine.load().prompt_tokens, engine.load().output_tokens) == (2 * len(PROMPT), 9)


class Guesses(FakeDrafter):
    def sizes(self, most: int) -> tuple[int, int]:
        return min(3, most), 2


def test_drafts_are_counted_as_they_were_checked_and_as_they_were_right() -> None:
    drafter = Guesses(0)
    engine, _ = fake_engine(speculation=drafter)
    (told,) = outputs(engine, "a", max_tokens=9).values()
    assert [len(each.token_ids) for each in told] == [1, 3, 3, 2]
    assert [(each.num_drafted, each.num_accepted) for each in told] == [(0, 0), (3, 2), (3, 2), (1, 1)]
    assert [token for each in told for token in each.token_ids] == expected_tokens(PROMPT, 9)
    assert (drafter.counts.num_draft_tokens, drafter.counts.num_accepted_tokens) == (7, 5)
    assert engine.load().output_tokens == 9
