"""Prices: which one applies, and exact sums in billionths."""

from datetime import UTC, datetime

import pytest

from pilotlight.edge_router.metering.ledger.prices import BILLIONTHS, PriceList
from pilotlight.sites.network import PriceConfig
from pilotlight.wire.hop.usage import ResourceUse
from tests.memory import bytes_kept_by

JULY = datetime(2026, 7, 1, tzinfo=UTC)
PRICES = PriceList(
    [
        PriceConfig(model="llama-*", input=0.2, cached_input=0.05, output=0.8),
        PriceConfig(model="llama-*", input=0.1, cached_input=0.02, output=0.4, valid_from=JULY),
        PriceConfig(model="*", input=1.0, output=2.0),
    ],
    "EUR",
)


def test_cached_tokens_are_discounted_and_the_newest_valid_price_counts() -> None:
    tokens = ResourceUse(prompt=1_000_000, cached=400_000, output=500_000, reasoning=100_000)
    before, after = JULY.timestamp() - 1, JULY.timestamp()
    assert PRICES.cost("llama-8b", before, tokens) == round((0.12 + 0.02 + 0.4) * BILLIONTHS)
    assert PRICES.cost("llama-8b", after, tokens) == round((0.06 + 0.008 + 0.2) * BILLIONTHS)
    assert PRICES.cost("other", after, tokens) == 2 * BILLIONTHS, (
        "without a separate price, cached tokens cost as much as others"
    )
    assert PriceList([], "EUR").cost("other", after, tokens) is None


def test_a_model_whose_price_was_asked_for_has_its_new_one_after_a_reload() -> None:
    prices = PriceList([PriceConfig(model="m", input=1.0, output=2.0)], "EUR")
    assert prices.cost("m", 0.0, ResourceUse(output=1)) == 2000
    prices.update_from(PriceList([PriceConfig(model="m", input=1.0, output=3.0)], "USD"))
    assert prices.cost("m", 0.0, ResourceUse(output=1)) == 3000
    assert prices.listed("m", 0.0) == {
        "prompt": "0.000001", "input_cache_read": "0.000001", "completion": "0.000003", "currency": "USD"
    }  # fmt: skip


def test_one_token_has_a_price_and_sums_are_whole_billionths() -> None:
    assert PRICES.cost("llama-8b", 0.0, ResourceUse(output=1)) == 800
    assert PRICES.cost("llama-8b", 0.0, ResourceUse(prompt=3, cached=3)) == 150
    assert PRICES.cost("llama-8b", 0.0, ResourceUse()) == 0


@pytest.mark.parametrize(("at", "prompt"), [(0.0, "0.0000002"), (JULY.timestamp(), "0.0000001")])
def test_a_list_of_models_contains_the_price_of_one_token(at: float, prompt: str) -> None:
    told = PRICES.listed("llama-8b", at)
    assert told is not None
    assert (told["prompt"], told["currency"]) == (prompt, "EUR")
    free = PriceList([PriceConfig(model="*", input=0, output=0)], "USD").listed("x", 0.0)
    assert free == {"prompt": "0", "input_cache_read": "0", "completion": "0", "currency": "USD"}


def test_names_that_clients_make_up_fill_no_memory() -> None:
    prices = PriceList([PriceConfig(model="m*", input=1.0, output=2.0)], "USD", most_models=2)
    for _ in range(2):
        told = [prices.cost(name, 0.0, ResourceUse(output=1)) for name in ("m1", "x", "m2", "y")]
        assert told == [2000, None, 2000, None]
    assert bytes_kept_by(lambda: [prices.cost(str(i), 0.0, ResourceUse(output=1)) for i in range(10_000)]) < 10_000


def test_of_prices_from_one_moment_the_first_in_the_file_counts_and_none_counts_before_its_time() -> None:
    same = [PriceConfig(model="m", input=price, output=price, valid_from=JULY) for price in (1.0, 2.0)]
    prices = PriceList(same, "USD")
    assert prices.cost("m", JULY.timestamp(), ResourceUse(prompt=1)) == 1000
    assert prices.cost("m", JULY.timestamp() - 0.001, ResourceUse(prompt=1)) is None
    assert prices.listed("m", 0.0) is None
    assert (bool(prices), bool(PriceList([], "USD"))) == (True, False)
