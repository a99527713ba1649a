"""The engine's guarantees about ends, refusals, failures and blocks, with a runner that has no model."""

from collections.abc import Sequence as SequenceOf

import pytest

from pilotlight.engine.api.protocol import Submit
from pilotlight.engine.core.step import ChoiceRow, RunResult
from pilotlight.engine.kv.tier_protocol import Tiers
from tests.engine.driver import drain, one, submit
from tests.engine.fake_runner import VOCAB, FakeForwarded, FakeLaunched, FakeRunner, expected_tokens, fake_engine

PROMPT = [5, 6, 7, 8, 9, 10]


def test_a_sequence_ends_with_length_at_max_tokens() -> None:
    heard = one(fake_engine()[0], submit("a", PROMPT, max_tokens=5))
    assert heard.token_ids == expected_tokens(PROMPT, 5)
    assert heard.finish_reason == "length"


def test_the_token_that_stops_is_delivered_with_the_reason() -> None:
    third = expected_tokens(PROMPT, 3)
    engine, _ = fake_engine(eos_token_ids=(third[-1],))
    heard = one(engine, submit("a", PROMPT, max_tokens=9, ignore_eos=False))
    assert (heard.token_ids, heard.finish_reason) == (third, "stop")
    ignoring = one(engine, submit("b", PROMPT, max_tokens=9))
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (9, "length")
    by_request = one(fake_engine()[0], submit("c", PROMPT, max_tokens=9, stop_token_ids=(third[-1],)))
    assert (by_request.token_ids, by_request.finish_reason) == (third, "stop")


def test_a_sequence_ends_with_length_when_the_context_is_full() -> None:
    engine, _ = fake_engine(num_blocks=3, block_size=4)
    heard = one(engine, submit("a", PROMPT, max_tokens=100))
    assert (len(heard.token_ids), heard.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (submit("a", []), "empty"),
        (submit("a", [1, VOCAB, 2]), f"token id {VOCAB}"),
        (submit("a", [1], temperature=-0.1), "temperature is -0.1"),
        (submit("a", [1], num_delivered_tokens=1), "num_delivered_tokens is 1"),
        (submit("a", [1] * 128), "at most 127"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_its_number(message: Submit, words: str) -> None:
    engine, _ = fake_engine()
    heard = one(engine, message)
    assert heard.finish_reason == "error"
    assert words in (heard.error or "")
    assert one(engine, submit("next", PROMPT, max_tokens=2)).token_ids == expected_tokens(PROMPT, 2)


def test_a_full_waiting_queue_refuses_the_next() -> None:
    engine, _ = fake_engine(max_waiting=2)
    for name in "abc":
        engine.submit(submit(name, PROMPT))
    (refused,) = engine.sequences.take_outputs()
    assert (refused.sequence_id, refused.error_code) == ("c", "overloaded")


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_returns_the_blocks_at_once_and_publishes_no_later_token(depth: int) -> None:
    engine, _ = fake_engine(depth=depth)
    engine.submit(submit("a", PROMPT, max_tokens=50))
    engine.submit(submit("b", PROMPT * 3, max_tokens=50))
    engine.step()
    before = engine.load().free_blocks
    engine.sequences.abort("b")
    assert engine.load().free_blocks > before
    engine.sequences.abort("a")
    assert engine.load().free_blocks == 32
    assert [o.finish_reason for o in engine.sequences.take_outputs()[-2:]] == ["abort", "abort"]
    engine.sequences.abort("a")  # a second abort has no effect
    while engine.has_work:
        engine.step()
    assert engine.sequences.take_outputs() == []


def test_a_failed_step_ends_its_sequences_and_the_next_request_works() -> None:
    engine, runner = fake_engine()
    one(engine, submit("warm", PROMPT))
    engine.submit(submit("a", PROMPT, max_tokens=50))
    engine.step()
    runner.explode = True
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail_all("engine_error", "a step failed")
    assert [o.error_code for o in engine.sequences.take_outputs()] == [None, "engine_error"]
    runner.explode = False
    heard = one(engine, submit("b", PROMPT, max_tokens=3))
    assert heard.token_ids == expected_tokens(PROMPT, 3)
    assert heard.num_cached_tokens == 0, "the cache of a failed step must not be trusted"
    assert engine.load().prefix_queries == 3 * len(PROMPT)


# With two steps under way, the second has taken a block as well.
@pytest.mark.parametrize(("depth", "num_scrubbed"), [(1, 3), (2, 4)])
def test_logits_that_are_not_numbers_end_one_sequence_and_poison_no_cache(depth: int, num_scrubbed: int) -> None:
    engine, runner = fake_engine(depth=depth)
    runner.bad_prompts.add((*PROMPT, *PROMPT))
    heard = drain(engine, [submit("bad", PROMPT * 2), submit("good", PROMPT, max_tokens=4)])
    assert heard["bad"].finish_reason == "error"
    assert "not finite" in (heard["bad"].error or "")
    assert heard["good"].token_ids == expected_tokens(PROMPT, 4)
    assert len(runner.scrubbed) == num_scrubbed
    runner.bad_prompts.clear()
    assert one(engine, submit("again", PROMPT * 2)).num_cached_tokens == 4, (
        "only blocks of the good sequence may be found"
    )


def test_a_sequence_whose_logits_are_not_numbers_leaves_the_blocks_that_it_shares_as_they_are() -> None:
    engine, runner = fake_engine()
    engine.submit(submit("good", PROMPT * 2, max_tokens=9))
    engine.step()
    runner.bad_prompts.add((*PROMPT, *PROMPT, 1))
    heard = drain(engine, [submit("bad", [*PROMPT * 2, 1])])
    assert heard["bad"].finish_reason == "error"
    assert engine.load().prefix_hits == 12
    assert len(runner.scrubbed) == 1, "only its one unshared block is cleared"
    assert heard["good"].token_ids == expected_tokens(PROMPT * 2, 9)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    engine, runner = fake_engine()
    prompt = [*PROMPT, 1, 2]
    one(engine, submit("a", prompt, max_tokens=1))
    heard = one(engine, submit("b", prompt, max_tokens=1))
    assert heard.num_cached_tokens == 4
    assert runner.batch_tokens == [8, 4]
    assert heard.token_ids == expected_tokens(prompt, 1)


def test_load_counts_what_was_computed() -> None:
    engine, _ = fake_engine()
    drain(engine, [submit("a", PROMPT, max_tokens=3), submit("b", PROMPT, max_tokens=4)])
    load = engine.load()
    assert (load.prompt_tokens, load.output_tokens) == (12, 7)
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)
    engine.submit(submit("c", PROMPT))
    assert engine.load().waiting_tokens == 6


def test_a_steps_time_is_reported_by_phase() -> None:
    engine, runner = fake_engine()
    ticks = iter([0, 100, 250, 300, 1000])  # start; end of scheduling, computing, publishing; end of the step
    engine._clock = lambda: next(ticks)
    engine.submit(submit("a", PROMPT, max_tokens=1))
    engine.step()
    assert engine.stats.last_step == (100, 850, 0.0, 50), "the fake device takes no time"
    assert runner.batch_tokens == [len(PROMPT)]


def test_closing_waits_for_the_step_in_flight() -> None:
    ended: list[str] = []

    class NotedLaunched(FakeLaunched):
        def collect(self) -> RunResult:
            ended.append("the step")
            return super().collect()

    class NotedRunner(FakeRunner):
        def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> FakeLaunched:
            super().choose(forwarded, rows)
            return NotedLaunched(RunResult([], {}, {}, 0.0))

    class NotedTiers(Tiers):
        def close(self) -> None:
            ended.append("the tiers")

    engine, _ = fake_engine(depth=2, make_tiers=lambda runner: NotedTiers(), runner_type=NotedRunner)
    engine.submit(submit("a", PROMPT, max_tokens=50))
    engine.step()
    engine.close()
    assert ended == ["the step", "the tiers"]
