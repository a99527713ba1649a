"""Scaling up and down with a fake clock: the wait of a model's next request decides whether it gets another device."""

import pytest

from pilotlight.engine.api.protocol import ModelLoad
from pilotlight.runtime.hosts.scaling import Heat, Verdict, wait_s, wait_with_one_less_s
from pilotlight.runtime.timings import SiteTimings

SEATS = 8
HOT_FOR_S = SiteTimings().hot_for_s
IDLE = ModelLoad(prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0)
QUEUED = ModelLoad(running=4, waiting_tokens=2000, prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0)


def judge(heat: Heat, loads: list[ModelLoad], from_s: float, to_s: float) -> list[tuple[float, Verdict]]:
    """Call `judge` every half second; return the verdicts other than "stay"."""
    found: list[tuple[float, Verdict]] = []
    for i in range(round((to_s - from_s) * 2) + 1):
        if (verdict := heat.judge(from_s + i / 2, loads, SEATS)) != "stay":
            found.append((from_s + i / 2, verdict))
    return found


def test_the_wait_is_of_the_prompts_ahead_at_the_measured_rate() -> None:
    assert wait_s(QUEUED, SEATS) == 2.0
    assert wait_s(ModelLoad(waiting_tokens=2000), SEATS) == 0.0, "its speed has not been measured"


def test_where_all_seats_are_taken_the_wait_is_also_for_answers_to_end() -> None:
    full = ModelLoad(
        running=SEATS, waiting=3, waiting_tokens=500, prefill_tokens_per_s=1000.0, decode_tokens_per_s=16.0
    )
    # Eight answers of 64 tokens at 16 tokens/s each: two end every second, and three already wait.
    assert wait_s(full, SEATS) == 0.5 + 2.0


def test_a_model_is_hot_only_after_some_seconds_on_end() -> None:
    heat = Heat(1.0, HOT_FOR_S, 30.0)
    assert judge(heat, [QUEUED], 0.0, HOT_FOR_S - 0.5) == []
    assert judge(heat, [IDLE], HOT_FOR_S, HOT_FOR_S) == [], "the burst is over"
    assert judge(heat, [QUEUED], HOT_FOR_S + 0.5, 2 * HOT_FOR_S) == []
    assert judge(heat, [QUEUED], 2 * HOT_FOR_S + 0.5, 2 * HOT_FOR_S + 0.5) == [(2 * HOT_FOR_S + 0.5, "more")]


def test_a_model_that_stays_hot_is_given_time_between_two_copies() -> None:
    found = judge(Heat(1.0, HOT_FOR_S, 30.0), [QUEUED, QUEUED], 0.0, 9.0)
    assert [verdict for _, verdict in found] == ["more", "more"]
    assert found[1][0] - found[0][0] >= HOT_FOR_S


def test_one_idle_copy_is_enough_not_to_be_hot() -> None:
    assert judge(Heat(1.0, HOT_FOR_S, 30.0), [QUEUED, IDLE], 0.0, 10.0) == []


def test_a_copy_goes_when_the_others_have_long_done_without_it() -> None:
    heat = Heat(1.0, HOT_FOR_S, 5.0)
    assert judge(heat, [IDLE, IDLE], 0.0, 4.5) == []
    assert judge(heat, [QUEUED, IDLE], 4.6, 4.6) == [], (
        "with one less the queue would be longer than a quarter of the threshold"
    )
    assert judge(heat, [IDLE, IDLE], 5.0, 9.5) == []
    assert judge(heat, [IDLE, IDLE], 10.0, 10.0) == [(10.0, "less")]


@pytest.mark.parametrize("tokens", [100, 400, 900, 1100])
def test_what_one_less_would_make_hot_is_never_cool(tokens: int) -> None:
    """Otherwise the number of replicas would oscillate."""
    load = ModelLoad(waiting_tokens=tokens, prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0)
    left = wait_with_one_less_s([load, load], SEATS)
    assert left == pytest.approx(2 * tokens / 1000)
    verdicts = judge(Heat(1.0, HOT_FOR_S, 2.0), [load, load], 0.0, 2.5)
    assert bool(verdicts) == (left < 0.25)


def test_the_last_copy_is_not_this_policys_business_and_zero_switches_it_off() -> None:
    assert judge(Heat(1.0, HOT_FOR_S, 1.0), [IDLE], 0.0, 100.0) == []
    assert judge(Heat(0.0, HOT_FOR_S, 1.0), [QUEUED, QUEUED], 0.0, 100.0) == []
    assert judge(Heat(1.0, HOT_FOR_S, 1.0), [], 0.0, 100.0) == []
