"""Rates learnt from steps of all kinds: decode speed, and how many prompt tokens lengthen a step by a given time."""

import math

import pytest

from pilotlight.engine.core.rates import Rates, TransferRate


def test_nothing_is_predicted_of_prompts_before_one_was_computed() -> None:
    rates = Rates()
    assert rates.num_prompt_tokens_in(0.2) == math.inf
    rates.count(0, 3, 3, 0.1)
    assert rates.num_prompt_tokens_in(0.2) == math.inf
    rates.count(100, 0, 1, 0.5)
    assert rates.num_prompt_tokens_in(0.2) == pytest.approx(40)


def test_what_decodes_take_by_themselves_is_no_part_of_what_prompts_add() -> None:
    rates = Rates()
    for _ in range(10):
        rates.count(0, 8, 8, 0.1)
        rates.count(50, 8, 8, 0.2)
    assert rates.num_prompt_tokens_in(0.2) == pytest.approx(100)
    assert rates.prefill_tokens_per_s == pytest.approx(250), "the rate that a new prompt will get beside decodes"
    rates = Rates()
    rates.count(0, 8, 8, 0.1)
    rates.count(50, 0, 1, 0.2)
    assert rates.num_prompt_tokens_in(0.2) == pytest.approx(50), "no decodes ran beside it"


def test_slow_decodes_before_make_no_prompt_look_free() -> None:
    rates = Rates()
    rates.count(0, 64, 64, 10.0)
    rates.count(100, 1, 2, 0.4)
    assert rates.num_prompt_tokens_in(0.1) == pytest.approx(100)


def test_every_token_that_a_step_gives_a_sequence_counts() -> None:
    """Accepted drafts give a sequence several tokens in a step; the time of a step without prompts stays the same."""
    rates = Rates()
    rates.count(0, 4, 12, 0.1)
    assert rates.decode_tokens_per_s == pytest.approx(30)
    rates.count(50, 4, 4, 0.2)
    assert rates.num_prompt_tokens_in(0.2) == pytest.approx(100)
    rates.count(0, 1, 0, 5.0)  # a step of a single prompt token counts nothing
    assert rates.decode_tokens_per_s == pytest.approx(30)


def test_a_transfer_takes_what_its_way_has_taken_and_a_moment_whatever_its_size() -> None:
    rate = TransferRate()
    assert rate.predict_s(0) == 0.0
    assert 0.0 < (moment := rate.predict_s(1 << 40)) < 0.1, "a link that has not been measured is assumed to be fast"
    rate.add(1000, 1.0)
    assert rate.bytes_per_s == 1000.0
    assert rate.predict_s(500) == pytest.approx(0.5 + moment)
    assert rate.predict_s(0) == 0.0, "nothing has to be moved"
    for _ in range(200):
        rate.add(4000, 1.0)
    assert rate.bytes_per_s == pytest.approx(4000.0, rel=0.01), "old measurements no longer count"
    rate.add(40_000, 1.0)
    assert rate.bytes_per_s < 8000.0, "one transfer does not represent all"


def test_a_way_that_is_slower_than_computing_is_tried_now_and_then() -> None:
    rate = TransferRate()
    assert [rate.is_worth_it(1.0, 2.0), rate.is_worth_it(1.0, 1.0), rate.is_worth_it(2.0, 1.0)] == [True, False, False]
    tried = [rate.is_worth_it(2.0, 1.0) for _ in range(46)]
    assert [i for i, is_tried in enumerate(tried) if is_tried] == [13, 29, 45]
