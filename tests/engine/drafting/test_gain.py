"""Drafting stops if it is measured to be slower, and the time lost until then is bounded."""

import pytest

from pilotlight.engine.drafting.gain import MeasuredGain
from pilotlight.engine.scheduling.plan import StepCount


def run(
    gain: MeasuredGain, num_steps: int, draft_s: float, tokens: int, looking_s: float = 0.0, batch: int = 8
) -> tuple[int, float]:
    """Simulate steps that take 1 s without drafts; return the number of steps with drafts, and the overall tokens per second."""
    num_drafting, seconds, given = 0, 0.0, 0
    for _ in range(num_steps):
        if gain.may_draft(batch) and tokens:
            step = StepCount(2 * batch, batch, batch, tokens, draft_s)
            num_drafting += 1
        else:
            looked_s = looking_s if gain.may_draft(batch) else 0.0
            step = StepCount(batch, 0, batch, batch, 1.0 + looked_s)
        gain.count(step, 0.0 if step.num_drafts else step.step_s - 1.0)
        seconds, given = seconds + step.step_s, given + step.num_tokens
    return num_drafting, given / seconds


def test_a_batch_is_measured_without_drafts_first() -> None:
    assert not MeasuredGain().may_draft(8)
    gain = MeasuredGain()
    run(gain, 8, 1.0, 8)
    assert gain.may_draft(8)
    assert not gain.may_draft(4), "for this batch size nothing is measured"


def test_drafts_that_pay_are_checked_in_all_steps_but_a_few() -> None:
    num_drafting, rate = run(MeasuredGain(), 1000, 1.5, 16)
    assert 960 < num_drafting < 992
    assert rate > 10.5, "16 tokens in 1.5 s are 10.7 a second, and without drafts 8"


@pytest.mark.parametrize(("draft_s", "tokens"), [(1.1, 8), (2.0, 12), (40.0, 8)])
def test_drafts_that_lose_take_a_small_share_of_the_time(draft_s: float, tokens: int) -> None:
    gain = MeasuredGain()
    run(gain, 1000, draft_s, tokens)
    _, rate = run(gain, 4000, min(draft_s, 3.0), tokens)
    assert rate > 0.99 * 8


def test_looking_that_finds_nothing_is_paid_for_as_well() -> None:
    gain = MeasuredGain()
    run(gain, 1000, 0.0, 0, looking_s=0.2)
    _, rate = run(gain, 4000, 0.0, 0, looking_s=0.2)
    assert 0.99 * 8 < rate < 8


def test_drafts_that_begin_to_pay_are_checked_again() -> None:
    gain = MeasuredGain()
    run(gain, 2000, 2.0, 8)
    num_drafting, _ = run(gain, 2000, 1.0, 16)
    assert num_drafting > 1500
