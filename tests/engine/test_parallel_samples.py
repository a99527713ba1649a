"""Several sequences of one prompt: the prompt is computed once, each sequence continues separately, and any may end early."""

from pathlib import Path

import pytest

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.waiting import ParallelSamples
from tests.checkpoints import write_llama
from tests.engine.driver import drain, load_engine, one, random_prompt, submit
from tests.engine.fake_runner import fake_engine

PROMPT = list(range(5, 36))  # 31 tokens: seven full blocks of four, and a part of one


def family(n: int, prompt: list[int] = PROMPT, **sampling: object) -> list[Submit]:
    first = submit("0", prompt, **sampling)
    return [first, *(submit(str(i), prompt, leader="0", **sampling) for i in range(1, n))]


@pytest.mark.parametrize("budget", [64, 10])
def test_the_prompt_is_computed_once(budget: int) -> None:
    engine, runner = fake_engine(num_blocks=64, max_num_batched_tokens=budget)
    heard = drain(engine, family(5, max_tokens=3))
    assert all(len(h.token_ids) == 3 for h in heard.values())
    assert sum(runner.batch_tokens) == len(PROMPT) + 4 * 3 + 5 * 2  # the other four compute the last, partial block
    assert [heard[str(i)].num_cached_tokens for i in range(5)] == [0, 28, 28, 28, 28]


def test_the_prompts_blocks_are_held_once() -> None:
    engine, _ = fake_engine(num_blocks=64)
    for message in family(5, max_tokens=50):
        engine.submit(message)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 5
    assert engine.scheduler.pool.num_held == 7 + 5 * 2


def test_those_that_wait_count_as_waiting() -> None:
    engine, _ = fake_engine(max_num_batched_tokens=10, max_waiting=4)
    for message in family(6):
        engine.submit(message)
    assert [o.error_code for o in engine.sequences.take_outputs()] == ["overloaded", "overloaded"]
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting) == (1, 3)
    engine.sequences.abort_all()
    assert not engine.has_work
    assert engine.load().waiting == 0
    assert engine.load().free_blocks == 32


def test_when_the_first_leaves_the_next_computes_the_prompt_for_all() -> None:
    engine, runner = fake_engine(num_blocks=64, max_num_batched_tokens=10)
    for message in family(4, max_tokens=3):
        engine.submit(message)
    engine.step()
    engine.sequences.abort("0")
    engine.sequences.abort("2")
    while engine.has_work:
        engine.step()
    ends = {o.sequence_id: o.finish_reason for o in engine.sequences.take_outputs() if o.finish_reason}
    assert ends == {"0": "abort", "1": "length", "2": "abort", "3": "length"}
    # The second sequence finds the blocks that the first completed before it was aborted.
    assert sum(runner.batch_tokens) == 10 + (len(PROMPT) - 8) + 3 + 2 * 2
    assert engine.scheduler.pool.num_held == 0


def test_a_short_prompt_waits_for_no_other() -> None:
    engine, runner = fake_engine()
    drain(engine, family(3, prompt=[1, 2, 3], max_tokens=1))
    assert runner.batch_tokens == [9]


@pytest.mark.parametrize(
    "message",
    [
        submit("b", PROMPT, leader="nobody", max_tokens=1),
        submit("b", PROMPT, leader="b", max_tokens=1),
        submit("b", PROMPT, salt=b"other", leader="a", max_tokens=1),
        submit("b", PROMPT[1:], leader="a", max_tokens=1),
    ],
)
def test_a_leader_of_another_prompt_or_tenant_is_not_waited_for(message: Submit) -> None:
    engine, runner = fake_engine()
    drain(engine, [submit("a", PROMPT, max_tokens=1), message])
    assert runner.batch_tokens == [len(PROMPT) + len(message.prompt_token_ids)]


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 13}, {"kv_tokens": 112}])
def test_each_sibling_draws_what_it_would_alone(tmp_path: Path, limits: dict[str, int]) -> None:
    write_llama(tmp_path)
    prompt = random_prompt(45, seed=7)
    first, *rest = (submit(str(i), prompt, max_tokens=40, temperature=1.0, seed=100 + i) for i in range(4))
    alone = [one(load_engine(tmp_path), message).token_ids for message in (first, *rest)]
    assert len(set(map(tuple, alone))) == 4
    engine = load_engine(tmp_path, **limits)
    together = drain(
        engine,
        [first, *(submit(str(i), prompt, leader="0", max_tokens=40, temperature=1.0, seed=100 + i) for i in (1, 2, 3))],
    )
    assert [together[str(i)].token_ids for i in range(4)] == alone
    assert ("kv_tokens" in limits) == (engine.scheduler.counts.preemptions > 0)


def test_a_held_sample_is_released_with_its_leader_or_dropped_by_itself() -> None:
    samples = ParallelSamples()
    first, second, other = (Sequence(name, [1], SamplingParams(1), b"") for name in ("b", "c", "e"))
    leader, another = (Sequence(name, [1], SamplingParams(1), b"") for name in ("a", "d"))
    for held, before in ((first, leader), (second, leader), (other, another)):
        samples.hold(held, before)
    assert (len(samples), samples.drop(leader), samples.drop(first), samples.drop(first)) == (3, False, True, False)
    assert samples.drop(other), "it is the last sample of its leader"
    assert (samples.release(another), samples.release(leader), samples.release(leader)) == ([], [second], [])
    assert len(samples) == 0
    assert samples._held == {}
