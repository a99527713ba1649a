"""A modelled site against what is known without it: queueing theory's closed forms, and a cache written down the slow way."""

import random
from collections.abc import Callable

import pytest

from edge_router.session import Prefix
from load_tests.sim.load import Shape, site_capacity
from load_tests.sim.site import DECODE_SHARE, SimSite, SiteSpec
from load_tests.sim.traces import Chain
from wire.status import Place

SPEED = 1000.0


def spec(kv_tokens: int = 10**9, max_inflight: int = 10**9) -> SiteSpec:
    return SiteSpec("here1", Place("here", 0.0, 0.0), SPEED, kv_tokens, max_inflight, wake_ms=0.0)


def mean_wait_s(load: float, length: Callable[[random.Random], float], requests: int = 60_000) -> float:
    """Poisson arrivals of prompts that share nothing. Decodes are not counted in: the prefill queue alone is looked at."""
    rng, site, now, waited = random.Random(5), SimSite(spec(kv_tokens=10**15)), 0.0, 0.0
    for number in range(requests):
        now += rng.expovariate(load * SPEED / 1000)
        tokens = max(2, round(length(rng)))
        admitted = site.admit((Prefix(number.to_bytes(16, "big"), tokens),), tokens, 1, now)
        assert admitted is not None
        waited += admitted.begins_at - now
    return waited / requests


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_random_prompts_wait_as_long_as_in_an_m_m_1_queue(load: float) -> None:
    expected = load / (1 - load) * 1.0  # times the mean service of a second
    assert mean_wait_s(load, lambda rng: rng.expovariate(1 / 1000)) == pytest.approx(expected, rel=0.06)


def test_equal_prompts_wait_half_as_long_as_pollaczek_and_khinchine_say() -> None:
    assert mean_wait_s(0.6, lambda rng: 1000.0) == pytest.approx(0.5 * 0.6 / 0.4, rel=0.06)


class SlowCache:
    """The same rules, nothing clever: segments in a list, the least recently used first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.segments: list[tuple[bytes, int]] = []

    def match(self, prefixes: tuple[Prefix, ...]) -> int:
        known = {digest for digest, _ in self.segments}
        cached = 0
        for prefix in prefixes:
            if prefix.digest not in known:
                break
            cached = prefix.tokens
        return cached

    def use(self, prefixes: tuple[Prefix, ...]) -> None:
        sizes = [
            prefix.tokens - before for prefix, before in zip(prefixes, (0, *(p.tokens for p in prefixes)), strict=False)
        ]
        for prefix, size in reversed(list(zip(prefixes, sizes, strict=True))):  # the tail is the older
            known = dict(self.segments)
            self.segments = [segment for segment in self.segments if segment[0] != prefix.digest]
            self.segments.append((prefix.digest, known.get(prefix.digest, size)))
        while sum(size for _, size in self.segments) > self.room:
            self.segments.pop(0)


@pytest.mark.parametrize("seed", range(5))
def test_the_prefix_cache_evicts_as_a_slow_one_does(seed: int) -> None:
    rng = random.Random(seed)
    site, slow = SimSite(spec(kv_tokens=5000)), SlowCache(5000)
    hits = 0
    for step in range(600):
        chain = Chain(rng.randrange(3))
        for _ in range(rng.randint(1, 5)):
            chain.grow(rng.randrange(3), 100 + chain.tokens % 300)
        prefixes = tuple(chain.prefixes)
        expected = slow.match(prefixes)
        admitted = site.admit(prefixes, chain.tokens + 1, 1, float(step))
        assert admitted is not None
        assert admitted.cached_tokens == expected
        hits += expected > 0
        site.prefilled()
        site.finished(chain.tokens + 1 - expected, 1, Prefix(prefixes[-1].digest, 0), float(step))
        slow.use(prefixes)
        slow.use((Prefix(prefixes[-1].digest, 0),))
    assert 50 < hits < 600  # both happen, else nothing was compared


def test_at_its_capacity_a_site_computes_all_the_time() -> None:
    shape = Shape(turns=1.0, computed_tokens=800.0, output_tokens=200.0)
    site = SiteSpec("here1", Place("here", 0.0, 0.0), 4000.0, 10**6, 100, 0.0)
    rate = site_capacity(site, shape)
    alone = rate * 200 * 0.02
    running = alone / (1 - 0.015 * alone)
    busy = rate * 800 / (4000 * (1 - DECODE_SHARE * running / 100))
    assert busy == pytest.approx(1.0, rel=1e-6)
    assert running < 100


def test_a_site_without_a_permit_left_refuses() -> None:
    site = SimSite(spec(max_inflight=2))
    asked = [site.admit((Prefix(bytes([i]) * 16, 100),), 100, 10, 0.0) for i in range(3)]
    assert [admitted is not None for admitted in asked] == [True, True, False]
