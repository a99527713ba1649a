"""A site's published traffic: arrival rates, and digests that follow the cache and never mix tenants (I4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.edge_router.requests.session import prefix_chain, tenant_salt
from pilotlight.runtime.telemetry.traffic import PUBLISH_EVERY_S, HeldPrefixes, Rate, Traffic
from pilotlight.wire.hop.prefixes import (
    MAX_PROMPT_PREFIXES,
    MAX_PUBLISHED,
    decode_prefixes,
    decode_prompt_prefixes,
    encode_prompt_prefixes,
    short_digest,
)
from pilotlight.wire.hop.status import ModelStatus

KV = 10_000


def published(held: HeldPrefixes, now: float = 0.0) -> frozenset[int]:
    return decode_prefixes(held.digest(now))


def test_a_rate_comes_near_the_true_one_and_fades_when_nothing_comes() -> None:
    rate = Rate()
    for step in range(600):
        rate.add(50, step / 10)
    assert rate.per_s(60.0) == pytest.approx(500, rel=0.05)
    assert rate.per_s(90.0) < 0.1 * rate.per_s(60.0)
    assert Rate().per_s(5.0) == 0.0


def test_a_prompt_in_the_cache_is_published_with_all_its_beginnings() -> None:
    held = HeldPrefixes()
    held.note([(3, 300), (2, 200), (1, 100)], KV)
    assert published(held) == {1, 2, 3}


def test_the_least_recently_used_goes_first_and_a_tail_before_what_it_hangs_on() -> None:
    held = HeldPrefixes()
    held.note([(3, 300), (2, 200), (1, 100)], 500)
    held.note([(5, 300), (4, 200), (1, 100)], 500)
    assert published(held) == {1, 2, 3, 4, 5}
    held.note([(9, 50)], 500)
    assert published(held, 20.0) == {1, 2, 4, 5, 9}
    held.note([(8, 200)], 500)
    assert published(held, 40.0) == {1, 4, 8, 9}


def test_the_digest_is_made_anew_only_now_and_then_and_never_outgrows_its_limit() -> None:
    held = HeldPrefixes()
    held.note([(1, 1)], 10**9)
    assert published(held, 0.0) == {1}
    for i in range(2, 3 * MAX_PUBLISHED):
        held.note([(i, 1)], 10**9)
    assert published(held, PUBLISH_EVERY_S / 2) == {1}
    newest = published(held, PUBLISH_EVERY_S)
    assert len(newest) == MAX_PUBLISHED
    assert 3 * MAX_PUBLISHED - 1 in newest
    assert not held.is_complete
    assert len(held) <= 2 * MAX_PUBLISHED


def test_a_model_that_has_left_the_device_has_nothing_published() -> None:
    traffic = Traffic(lambda: 0.0)
    traffic.arrived("ember")
    traffic.computed("ember", 300, 100, [(2, 300), (1, 100)], KV)
    status = traffic.published(ModelStatus("ember", "device"))
    assert decode_prefixes(status.prefixes) == {1, 2}
    assert status.prefixes_complete
    assert status.arriving_per_s == pytest.approx(0.1)
    assert status.arriving_tokens_per_s == pytest.approx(20.0)
    traffic.forget("other")
    assert traffic.published(ModelStatus("ember", "device")).prefixes
    traffic.forget("ember")
    assert traffic.published(ModelStatus("ember", "device")).prefixes == b""
    assert traffic.published(ModelStatus("other", "device")) == ModelStatus("other", "device")


def test_equal_conversations_of_two_tenants_have_no_digest_in_common() -> None:
    pieces = [(f"message {i}".encode(), True) for i in range(20)]
    chains = [prefix_chain(tenant_salt(f"Bearer {who}", "", "secret"), b"ember", pieces) for who in ("one", "two")]
    held = HeldPrefixes()
    held.note([(short_digest(prefix.digest), prefix.tokens) for prefix in reversed(chains[0])], KV)
    assert published(held) == {short_digest(prefix.digest) for prefix in chains[0]}
    assert not published(held) & {short_digest(prefix.digest) for prefix in chains[1]}


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=MAX_PROMPT_PREFIXES))
def test_named_prefixes_come_back_as_they_went(prefixes: list[tuple[int, int]]) -> None:
    assert list(decode_prompt_prefixes(encode_prompt_prefixes(prefixes))) == prefixes


@pytest.mark.parametrize("value", ["?", "AAAA", "A" * 4000, "\u00e9"])
def test_a_header_that_names_no_prefixes_is_refused(value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_prompt_prefixes(value)
