"""The estimate of a prompt that another site computes, and the decision whether lending it pays."""

import pytest

from pilotlight.support.estimates import HAND_OVER_S, LAST_CHUNK_TOKENS
from pilotlight.wire.hop.lending import LentTerms

TOKENS = 4000
OWN_RATE = 1000.0


def pays(terms: LentTerms, queue_s: float) -> bool:
    return terms.pays(terms.cost(TOKENS, TOKENS), queue_s + TOKENS / OWN_RATE, queue_s, OWN_RATE)


def test_a_prompt_costs_its_queue_its_computation_and_what_the_link_does_not_hide() -> None:
    fast = LentTerms(4000.0, queue_s=0.5, rtt_s=0.1, link_tokens_per_s=8000.0).cost(TOKENS, TOKENS)
    assert fast.link_s == pytest.approx(0.2 + LAST_CHUNK_TOKENS / 8000)
    assert fast.total_s == pytest.approx(1.5 + fast.link_s + HAND_OVER_S)
    slow = LentTerms(4000.0, queue_s=0.5, rtt_s=0.1, link_tokens_per_s=1000.0).cost(TOKENS, TOKENS)
    assert slow.total_s == pytest.approx(0.2 + 4.0 + HAND_OVER_S), "the link's time hides the computation"
    shared = LentTerms(4000.0, link_tokens_per_s=1000.0, moving_tokens=1000).cost(TOKENS, TOKENS)
    assert shared.total_s == pytest.approx(5.0 + HAND_OVER_S), "the blocks of earlier prompts come first"


def test_a_faster_site_pays_without_a_queue_and_must_gain_more_than_its_error() -> None:
    assert pays(LentTerms(4000.0), queue_s=0.0)
    assert not pays(LentTerms(4000.0, error=3.0), queue_s=0.0)


@pytest.mark.parametrize(
    "terms",
    [
        LentTerms(700.0),  # it computes more slowly than the site itself
        LentTerms(4000.0, link_tokens_per_s=700.0),  # its link does not keep pace with the site itself
        LentTerms(4000.0, queue_s=2.0),  # its queue is longer than the site's by more than it gains
    ],
)
def test_a_loan_whose_early_end_would_delay_the_prompt_pays_only_within_its_wait(terms: LentTerms) -> None:
    assert not pays(terms, queue_s=0.5)
    assert pays(terms, queue_s=1.25 * terms.cost(TOKENS, TOKENS).total_s + 0.1)
