"""A site declines requests that would wait too long, but only for routers of its network, and only if it knows its own speed."""

import pytest

from pilotlight.engine.api.protocol import ModelLoad
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.runtime.api.router_context import Declined, router_context
from pilotlight.wire.hop.headers import MAX_QUEUE_WAIT, QUEUE

BUSY = ModelLoad(waiting_tokens=3000, prefill_tokens_per_s=2000.0)


def scope(patience: str | None, genuine: bool = True) -> dict[str, object]:
    headers = [] if patience is None else [(MAX_QUEUE_WAIT.encode(), patience.encode())]
    return {"headers": headers, GENUINE_HOP: genuine}


def decline_if_too_long(scope: dict[str, object], load: ModelLoad | None) -> None:
    context, _ = router_context(scope, b"")
    context.check_queue(load)


def test_a_queue_beyond_the_patience_declines_and_says_how_long_it_is() -> None:
    with pytest.raises(Declined) as caught:
        decline_if_too_long(scope("1499"), BUSY)
    assert (QUEUE, "3000") in caught.value.headers()
    assert "1500 ms" in str(caught.value)
    decline_if_too_long(scope("1500"), BUSY)


@pytest.mark.parametrize("patience", [None, "", "-1", "soon", "1e3", "9" * 12, "\u0663"])
def test_without_a_sensible_patience_every_queue_is_accepted(patience: str | None) -> None:
    raw = {"headers": [], GENUINE_HOP: True} if patience is None else scope(patience)
    decline_if_too_long(raw, BUSY)


def test_strangers_cannot_make_a_site_decline_or_learn_its_queue() -> None:
    decline_if_too_long(scope("0", genuine=False), BUSY)


@pytest.mark.parametrize("load", [None, ModelLoad(waiting_tokens=9000)])
def test_a_site_that_does_not_know_its_speed_accepts_all_requests(load: ModelLoad | None) -> None:
    decline_if_too_long(scope("0"), load)
