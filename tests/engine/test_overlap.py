"""Overlapped steps: each is launched before the tokens of the previous one are known, and outputs stay the same."""

import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.step import ChoiceRow, RunResult, StepInput
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.scheduling.plan import SchedulerLimits
from tests.engine.driver import Heard, drain, load_engine, random_prompt, submit
from tests.engine.fake_runner import (
    FakeForwarded,
    FakeLaunched,
    FakeRunner,
    expected_tokens,
    fake_engine,
    next_penalised_token,
    prompt_logprobs_of,
)

PROMPT = [5, 6, 7, 8, 9, 10]


class QueuedLaunch:
    """A launched step that runs for `TAKES_S` seconds on the device, after all earlier ones."""

    TAKES_S = 0.125

    def __init__(self, device: "QueueingRunner", result: RunResult) -> None:
        self._device, self._result, self._launched_at = device, result, device.now
        device.free_at = max(device.now, device.free_at) + self.TAKES_S
        self._ends_at = device.free_at

    def collect(self) -> RunResult:
        self._device.now = max(self._device.now, self._ends_at)
        return self._result._replace(device_s=self._device.now - self._launched_at)


class QueueingRunner(FakeRunner):
    now = free_at = 0.0

    def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> Any:
        return QueuedLaunch(self, super().choose(forwarded, rows).collect())


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_sequences_shares_of_the_device_are_all_of_the_time_that_it_was_at_work(depth: int) -> None:
    engine, runner = fake_engine(depth=depth, max_num_batched_tokens=12, clock=lambda: cast("Any", runner).now)
    runner.__class__ = QueueingRunner
    assert isinstance(runner, QueueingRunner)
    told: dict[str, int] = {}
    for turn in range(2):
        for n, size in enumerate((3, 30, 7)):  # the second prompt needs several steps
            engine.submit(submit(f"{turn} {n}", list(range(1, size)), max_tokens=5 + n))
        while engine.has_work:
            engine.step()
            for output in engine.sequences.take_outputs():
                told[output.sequence_id] = told.get(output.sequence_id, 0) + output.device_us
        runner.now += 100.0  # the device is idle
    at_work_us = len(runner.batch_tokens) * QueuedLaunch.TAKES_S * 1e6
    assert at_work_us == (runner.now - 200.0) * 1e6
    unclaimed = (
        depth * 2 * QueuedLaunch.TAKES_S * 1e6
    )  # the time of a turn's last steps, which compute only ended sequences
    assert at_work_us - unclaimed - len(told) <= sum(told.values()) <= at_work_us
    if depth == 1:
        assert sum(told.values()) >= at_work_us - len(told), "only rounding below a microsecond may be lost"
    assert told["0 1"] > told["0 0"] > 0


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((7, 5.0), (9, -100.0))},
    "logprobs": {"num_logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": True, "num_prompt_logprobs": 2},
    "one token": {"max_tokens": 1},
}


def told(heard: Heard) -> tuple[Any, ...]:
    return heard.token_ids, heard.finish_reason, heard.logprobs, heard.prompt_logprobs


@pytest.mark.parametrize("kv_tokens", [2048, 192], ids=["room", "preempted"])
def test_all_outputs_are_the_same_as_without(checkpoint: Path, kv_tokens: int) -> None:
    def run(depth: int) -> dict[str, Heard]:
        engine = load_engine(checkpoint, depth=depth, kv_tokens=kv_tokens, max_num_batched_tokens=40)
        requests = [
            submit(f"{name} {n}", random_prompt(n, seed=n), **{"max_tokens": 45, **kind})
            for n in (4, 33)
            for name, kind in KINDS.items()
        ]
        heard = drain(engine, requests)
        assert (engine.scheduler.counts.preemptions > 0) == (kv_tokens < 2048)
        return heard

    apart, overlapped = run(1), run(2)
    for name in apart:
        a, b = apart[name], overlapped[name]
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), name
        assert len(a.logprobs) == len(b.logprobs)
        for x, y in zip(
            [*a.logprobs, *(a.prompt_logprobs or ())], [*b.logprobs, *(b.prompt_logprobs or ())], strict=True
        ):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


def test_a_token_is_published_one_step_late_and_the_last_step_only_collects() -> None:
    engine, runner = fake_engine(depth=2)
    engine.submit(submit("a", PROMPT, max_tokens=2))
    seen = []
    while engine.has_work:
        engine.step()
        seen.append([token for output in engine.sequences.take_outputs() for token in output.token_ids])
    assert seen == [[], expected_tokens(PROMPT, 1), expected_tokens(PROMPT, 2)[1:]]
    assert runner.batch_tokens == [6, 1], "an end by length is known in advance, so no step is wasted"


def test_an_id_taken_again_while_its_old_step_is_in_flight_hears_only_its_own() -> None:
    engine, _ = fake_engine(depth=2)
    engine.submit(submit("a", PROMPT, max_tokens=5))
    engine.step()
    engine.sequences.abort("a")
    engine.sequences.take_outputs()
    other = [1, 2, 3]
    assert drain(engine, [submit("a", other, max_tokens=3)])["a"].token_ids == expected_tokens(other, 3)


def test_siblings_wait_for_the_results_of_their_prompt() -> None:
    engine, _ = fake_engine(depth=2)
    prompt = tuple(range(20))
    first = Submit("a", "tiny", prompt, SamplingParams(4, temperature=0.0))
    engine.submit(first)
    engine.step()  # in flight, so that its blocks are not cached yet
    engine.submit(Submit("b", "tiny", prompt, SamplingParams(4, temperature=0.0), leader="a"))
    heard = drain(engine, [])
    assert heard["b"].num_cached_tokens == 16
    assert heard["b"].token_ids == heard["a"].token_ids == expected_tokens(list(prompt), 4)


def test_a_result_from_before_a_preemption_counts_for_nothing_after_it() -> None:
    engine, _ = fake_engine(depth=2, num_blocks=12, max_num_batched_tokens=8)
    prompt = list(range(22))
    engine.submit(submit("a", prompt, max_tokens=3, prompt_logprobs=True))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert engine.scheduler.preemption.preempt_youngest(keep_oldest=False)
    engine.step()  # the sequence starts again, and gets the late result of its earlier chunk
    assert (sequence.num_computed_tokens, sequence.num_completed_tokens, sequence.prompt_logprobs) == (8, 0, [])
    heard = drain(engine, [])["a"]
    assert heard.token_ids == expected_tokens(prompt, 3)
    assert heard.prompt_logprobs == prompt_logprobs_of(prompt)


class TimedRunner(FakeRunner):
    """A runner with a simulated device that computes while the host continues."""

    FORWARD_S, CHOICE_S, HOST_S = 10.0, 1.0, 0.5

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, depth=2)
        self.now = self.busy_until = 0.0
        self.num_overlapped = 0

    def clock(self) -> float:
        """Advance the time by HOST_S, the host's work between two looks at the clock, and return it."""
        self.now += self.HOST_S
        return self.now

    def forward(self, step: StepInput) -> FakeForwarded:
        self.num_overlapped += self.busy_until > self.now
        self._compute(self.FORWARD_S)
        return super().forward(step)

    def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> FakeLaunched:
        assert self.busy_until > self.now, "the device has finished before the choice is launched"
        self._compute(self.CHOICE_S)
        return TimedLaunched(super().choose(forwarded, rows), self, self.busy_until)

    def _compute(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds


class TimedLaunched(FakeLaunched):
    def __init__(self, launched: FakeLaunched, runner: TimedRunner, ends_at: float) -> None:
        super().__init__(launched.collect())
        self._runner, self._ends_at = runner, ends_at

    def collect(self) -> RunResult:
        self._runner.now = max(self._runner.now, self._ends_at)
        return super().collect()


@pytest.mark.parametrize("num_penalised", [0, 1, 8])
def test_penalised_sequences_cost_no_overlap(num_penalised: int) -> None:
    """Each of forty steps except the first is launched while the device computes the previous one."""
    runner = TimedRunner(128, 4)
    engine = Engine(fake_engine(num_blocks=128)[0].info, runner, SchedulerLimits(4, 64, 8, 100), clock=runner.clock)
    prompts = {str(i): [i, *PROMPT] for i in range(8)}
    penalised = [{"presence_penalty": 0.5}] * num_penalised + [{}] * (8 - num_penalised)
    requests = [
        submit(name, prompt, max_tokens=40, **kind)
        for (name, prompt), kind in zip(prompts.items(), penalised, strict=True)
    ]
    heard = drain(engine, requests)
    assert (len(runner.batch_tokens), runner.num_overlapped) == (40, 39)
    for i, (name, prompt) in enumerate(prompts.items()):
        outputs = heard[name].token_ids
        assert len(outputs) == 40
        if i < num_penalised:
            assert outputs == [next_penalised_token(prompt, outputs[:n]) for n in range(40)]
        else:
            assert outputs == expected_tokens(prompt, 40)


def test_a_sequence_that_has_ended_is_chosen_for_no_more() -> None:
    engine, runner = fake_engine(depth=2, eos_token_ids=(expected_tokens(PROMPT, 2)[-1],))
    rows: list[int] = []
    choose = runner.choose

    def noting(forwarded: FakeForwarded, of: SequenceOf[ChoiceRow]) -> FakeLaunched:
        rows.append(len(of))
        return choose(forwarded, of)

    runner.choose = noting
    other = [9, 8, 7]
    heard = drain(engine, [submit("a", PROMPT, max_tokens=9, ignore_eos=False), submit("b", other, max_tokens=5)])
    assert heard["a"].token_ids == expected_tokens(PROMPT, 2)
    assert heard["b"].token_ids == expected_tokens(other, 5)
    assert runner.batch_tokens == [9, 2, 2, 1, 1]
    assert rows == [2, 2, 1, 1, 1]


def test_a_pipeline_has_as_many_steps_under_way_as_stages() -> None:
    engine, _ = fake_engine(depth=3, max_num_batched_tokens=6)
    prompts = {str(i): [i, *PROMPT[1:]] for i in range(3)}
    for name, prompt in prompts.items():
        engine.submit(submit(name, prompt, max_tokens=5))
    under_way = []
    heard: dict[str, Heard] = {name: Heard() for name in prompts}
    while engine.has_work:
        engine.step()
        under_way.append(len(engine.in_flight))
        for output in engine.sequences.take_outputs():
            heard[output.sequence_id].hear(output)
    assert {name: h.token_ids for name, h in heard.items()} == {n: expected_tokens(p, 5) for n, p in prompts.items()}
    assert max(under_way) == 2
    assert under_way.count(2) >= len(under_way) - 4


def test_closing_and_failing_end_every_step_under_way() -> None:
    for end in ("close", "fail_all"):
        engine, _ = fake_engine(depth=3, max_num_batched_tokens=6)
        for name in "ab":
            engine.submit(submit(name, PROMPT, max_tokens=5))
        engine.step()
        engine.step()
        assert len(engine.in_flight) == 2
        if end == "close":
            engine.close()
        else:
            engine.fail_all("engine_error", "a step failed")
            assert {o.sequence_id for o in engine.sequences.take_outputs()} == {"a", "b"}
            assert not engine.has_work
        assert not engine.in_flight


@pytest.mark.skipif(os.environ.get("PILOTLIGHT_TEST_DEVICE") != "cuda", reason="a CPU is never waited for")
def test_a_launch_never_waits_for_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that waits would leave the device idle between steps."""
    engine = load_engine(checkpoint, depth=2, max_num_batched_tokens=40)

    def strict(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    for round_ in range(3):  # the first round compiles kernels and records steps
        if round_ == 1:
            for name in ("forward", "choose"):
                monkeypatch.setattr(ModelRunner, name, strict(getattr(ModelRunner, name)))
        requests = [
            submit(f"{name} {n}", random_prompt(n, seed=n + round_), **{"max_tokens": 20, **kind})
            for n in (4, 33)
            for name, kind in KINDS.items()
        ]
        heard = drain(engine, requests)
        assert {name: one.error for name, one in heard.items() if one.error} == {}
