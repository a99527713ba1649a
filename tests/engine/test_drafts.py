"""Verification of drafts: they change the number of steps, but no output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.core.engine import Engine
from pilotlight.engine.execution.runner import ModelRunner
from tests.engine.core.test_engine import PROMPT
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit
from tests.engine.fake_drafter import FakeDrafter, Remembering
from tests.engine.fake_runner import FakeRunner, expected_tokens, fake_engine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "sampled with penalties": {"temperature": 0.8, "seed": 5, "top_k": 4, "frequency_penalty": 0.7},
    "bias": {"logit_bias": ((7, 5.0), (9, -100.0))},
    "logprobs": {"num_logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": True, "num_prompt_logprobs": 2},
}


class Exact(FakeDrafter):
    """A drafter that proposes `num_drafts` tokens, of which the first `num_right` are right."""

    def __init__(self, num_drafts: int, num_right: int) -> None:
        super().__init__(0)
        self.num_drafts, self.num_right = num_drafts, num_right

    def sizes(self, most: int) -> tuple[int, int]:
        return min(self.num_drafts, most), self.num_right


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kv_tokens", [2048, 192], ids=["room", "preempted"])
def test_a_model_answers_the_same_with_drafts_as_without(checkpoint: Path, depth: int, kv_tokens: int) -> None:
    requests = [
        submit(f"{name} {n}", random_prompt(n + i, seed=n), max_tokens=45, **kind)
        for n in (4, 33)
        for i, (name, kind) in enumerate(KINDS.items())
    ]
    apart = drain(load_engine(checkpoint, kv_tokens=2048, max_num_batched_tokens=40), requests)
    engine = load_engine(checkpoint, depth=depth, kv_tokens=kv_tokens, max_num_batched_tokens=40)
    answers = {request.prompt_token_ids: apart[request.sequence_id].token_ids for request in requests}
    engine.scheduler.speculation = Remembering(answers)
    checked = noting_steps(engine, lambda step: sum(n > 1 for n in step.lengths[: step.num_decodes]))
    together = drain(engine, requests)
    assert sum(checked) > 50
    assert (engine.scheduler.counts.preemptions > 0) == (kv_tokens < 2048)
    for name in apart:
        a, b = apart[name], together[name]
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), name
        assert len(a.logprobs) == len(b.logprobs)
        for x, y in zip(
            [*a.logprobs, *(a.prompt_logprobs or ())], [*b.logprobs, *(b.prompt_logprobs or ())], strict=True
        ):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


def noting_steps(engine: Engine, note: Callable[[Any], int]) -> list[int]:
    noted: list[int] = []
    runner = engine.runner
    assert isinstance(runner, ModelRunner | FakeRunner)
    forward = runner.forward

    def noting(step: Any) -> Any:
        noted.append(note(step))
        return forward(step)

    runner.forward = noting
    return noted


@pytest.mark.parametrize(
    ("num_right", "steps"), [(4, [6, 5, 5]), (0, [6, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1]), (2, [6, 5, 5, 4, 1])]
)
def test_right_drafts_save_steps_and_wrong_ones_cost_none(num_right: int, steps: list[int]) -> None:
    engine, runner = fake_engine(speculation=Exact(4, num_right))
    heard = one(engine, submit("a", PROMPT, max_tokens=11))
    assert (heard.token_ids, heard.finish_reason) == (expected_tokens(PROMPT, 11), "length")
    assert runner.batch_tokens == steps


def test_an_output_carries_all_tokens_of_its_step() -> None:
    engine, _ = fake_engine(speculation=Exact(4, 4))
    engine.submit(submit("a", PROMPT, max_tokens=11, num_logprobs=0))
    outputs = []
    while engine.has_work:
        engine.step()
        outputs += engine.sequences.take_outputs()
    assert [len(output.token_ids) for output in outputs] == [1, 5, 5]
    assert [len(output.logprobs or ()) for output in outputs] == [1, 5, 5]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_follows_a_token_that_stops_among_the_drafts(depth: int) -> None:
    answer = expected_tokens(PROMPT, 9)
    engine, _ = fake_engine(depth=depth, speculation=Exact(6, 6))
    heard = one(engine, submit("a", PROMPT, max_tokens=20, stop_token_ids=(answer[4],)))
    assert (heard.token_ids, heard.finish_reason) == (answer[:5], "stop")
    assert one(engine, submit("b", [*PROMPT, *answer[:5]], max_tokens=2)).num_cached_tokens == 8, (
        "two full blocks of the ten computed tokens"
    )


def test_only_accepted_tokens_can_be_found_by_others() -> None:
    engine, _ = fake_engine(speculation=Exact(6, 1))
    answer = expected_tokens(PROMPT, 3)
    engine.submit(submit("a", PROMPT, max_tokens=20))
    engine.step()
    engine.step()  # verifies six drafts, of which the first is right
    (sequence,) = engine.scheduler.running
    assert sequence.token_ids == [*PROMPT, *answer]
    assert (sequence.num_computed_tokens, sequence.num_completed_tokens, sequence.num_registered_blocks) == (8, 8, 2)
    wrong = [*PROMPT, *answer[:2], (answer[2] + 1) % 1000]
    assert len(drain(engine, [submit("b", [*wrong, 5, 6, 7, 8], max_tokens=2)])["b"].token_ids) == 2


def test_drafts_take_only_what_prompts_leave() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=10, speculation=Exact(6, 6))
    engine.submit(submit("a", PROMPT, max_tokens=20))
    engine.step()
    engine.submit(submit("b", list(range(25)), max_tokens=1))
    while engine.has_work:
        engine.step()
    assert runner.batch_tokens[1:4] == [10, 10, 10]
    assert runner.num_drafts > 0


def test_drafts_preempt_no_sequence() -> None:
    engine, runner = fake_engine(num_blocks=6, block_size=4, speculation=Exact(6, 6))
    heard = drain(engine, [submit(name, [i, *PROMPT[1:]], max_tokens=6) for i, name in enumerate("ab")])
    assert [heard[name].token_ids for name in "ab"] == [expected_tokens([i, *PROMPT[1:]], 6) for i in range(2)]
    assert engine.scheduler.counts.preemptions == 0
    assert runner.num_drafts > 0


@pytest.mark.parametrize("depth", [2, 3])
def test_an_abort_while_drafts_are_checked_publishes_no_later_token(depth: int) -> None:
    engine, runner = fake_engine(depth=depth, speculation=Exact(4, 4))
    engine.submit(submit("a", PROMPT, max_tokens=50))
    heard: dict[str, Heard] = {"a": Heard()}
    while not runner.num_drafts:
        engine.step()
    for output in engine.sequences.take_outputs():
        heard["a"].hear(output)
    engine.sequences.abort("a")
    assert engine.load().free_blocks == 32
    drain(engine, [], heard=heard)
    assert heard["a"].finish_reason == "abort"
    assert heard["a"].token_ids == expected_tokens(PROMPT, 50)[: len(heard["a"].token_ids)]


def test_a_non_finite_value_after_a_refused_draft_ends_its_sequence_and_poisons_no_block() -> None:
    """The value is never chosen, but it is in the block. The next holder's attention reads masked values too, so NaN would spread."""
    answer = expected_tokens(PROMPT, 2)
    engine, runner = fake_engine(speculation=Exact(2, 0))
    runner.bad_prompts.add((*PROMPT, answer[0], (answer[1] + 1) % 1000))
    heard = drain(engine, [submit("a", PROMPT, max_tokens=9), submit("b", [9, 8, 7], max_tokens=9)])
    assert "not finite" in (heard["a"].error or "")
    assert heard["b"].token_ids == expected_tokens([9, 8, 7], 9)
    assert runner.scrubbed
