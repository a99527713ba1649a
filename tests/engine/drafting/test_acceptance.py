"""The estimate of the acceptance rate of drafts: it starts with a prior, and follows the observed rate."""

import pytest

from pilotlight.engine.drafting.gain import AcceptanceRates


def test_what_was_expected_gives_way_to_what_is_seen() -> None:
    rates = AcceptanceRates(weight=4.0, kept=1.0, kept_untried=0.9)
    assert rates.rate("suffix", 0.75) == 0.75
    for _ in range(4):
        rates.add("suffix", False)
    assert rates.rate("suffix", 0.75) == pytest.approx(3 / 8)
    assert rates.rate("grammar", 0.9) == 0.9, "other kinds of drafts are unaffected"


def test_the_newest_count_most() -> None:
    rates = AcceptanceRates(weight=1.0, kept=0.5, kept_untried=1.0)
    for is_accepted in (True,) * 20 + (False,) * 3:
        rates.add("suffix", is_accepted)
    assert rates.rate("suffix", 1.0) < 0.5


def test_what_is_not_tried_is_expected_again_after_a_while() -> None:
    rates = AcceptanceRates(weight=2.0, kept=1.0, kept_untried=0.9)
    for _ in range(30):
        rates.add("suffix", False)
    assert rates.rate("suffix", 0.8) < 0.1
    for _ in range(60):
        rates.fade("suffix")
    assert rates.rate("suffix", 0.8) > 0.7
    rates.fade("unknown")
