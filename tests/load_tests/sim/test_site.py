"""The model of a site, compared with the closed forms of queueing theory and with a simple cache."""

import random
from collections.abc import Callable

import pytest

from load_tests.sim.load import Shape, site_capacity
from load_tests.sim.site import CHUNK, GRAY, STEP_GROWTH, STEP_S, Fault, Job, SimSite, SiteSpec
from load_tests.sim.traces import Chain
from pilotlight.edge_router.requests.session import Prefix
from pilotlight.wire.hop.status import Place

SPEED = 1000.0


def spec(kv_tokens: int = 10**9, max_inflight: int = 10**9) -> SiteSpec:
    return SiteSpec("here1", Place("here", 0.0, 0.0), SPEED, kv_tokens, max_inflight, wake_ms=0.0)


def admit(site: SimSite, prefixes: tuple[Prefix, ...], prompt: int, output: int, now: float) -> Job | None:
    site.advance(now)
    return site.admit(None, prefixes, prompt, output, Prefix(prefixes[-1].digest, 0), now)


def mean_wait_s(load: float, length: Callable[[random.Random], float], requests: int = 40_000) -> float:
    """Return the mean wait for prefill, in seconds, of Poisson arrivals of prompts without shared prefixes and with one output token."""
    rng, site, now, jobs = random.Random(5), SimSite(spec(kv_tokens=10**15)), 0.0, []
    for number in range(requests):
        now += rng.expovariate(load * SPEED / 1000)
        tokens = max(2, round(length(rng)))
        job = admit(site, (Prefix(number.to_bytes(16, "big"), tokens),), tokens, 1, now)
        assert job is not None
        jobs.append((now, job))
    site.advance(now + 10**6)
    return sum(job.begins_at - arrived for arrived, job in jobs) / requests


@pytest.mark.long
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_random_prompts_wait_as_long_as_in_an_m_m_1_queue(load: float) -> None:
    expected = load / (1 - load) * 1.0  # the mean wait, as a multiple of the mean service time of 1 s
    assert mean_wait_s(load, lambda rng: rng.expovariate(1 / 1000)) == pytest.approx(expected, rel=0.06)


@pytest.mark.long
def test_equal_prompts_wait_half_as_long_as_pollaczek_and_khinchine_say() -> None:
    assert mean_wait_s(0.6, lambda rng: 1000.0) == pytest.approx(0.5 * 0.6 / 0.4, rel=0.06)


class SlowCache:
    """A slow, simple cache with the same rules: segments in a list, the least recently used first."""

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
        for prefix, size in reversed(list(zip(prefixes, sizes, strict=True))):  # the end of a prompt is evicted first
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
        site.advance(1000.0 * step)
        answer = Prefix(prefixes[-1].digest, 0)
        job = site.admit(
            None, prefixes, chain.tokens + 1, 0, answer, 1000.0 * step
        )  # no output: caches hold prompts only
        assert job is not None
        assert job.cached_tokens == expected
        hits += expected > 0
        site.advance(1000.0 * step + 999)
        assert (site.running, site.waiting) == (0, 0)
        slow.use(prefixes)
        slow.use((Prefix(prefixes[-1].digest, 0),))
    assert 50 < hits < 600  # hits and misses must both occur


@pytest.mark.long
@pytest.mark.parametrize("output", [200, 1])
def test_beyond_its_capacity_a_site_falls_behind_and_below_it_does_not(output: int) -> None:
    shape = Shape(turns=1.0, computed_tokens=800.0, output_tokens=output)
    described = SiteSpec("here1", Place("here", 0.0, 0.0), 4000.0, 10**7, 10**6, 0.0)

    def queued_at_end(load: float) -> int:
        site, now = SimSite(described), 0.0
        for number in range(2500):
            now += 1 / (load * site_capacity(described, shape))
            assert admit(site, (Prefix(number.to_bytes(16, "big"), 800),), 800, output, now) is not None
        return site.queued_tokens()

    assert queued_at_end(0.98) <= 2 * 800
    assert queued_at_end(1.05) > 30 * 800


def test_a_site_whose_permits_run_out_first_is_bounded_by_them() -> None:
    shape = Shape(turns=1.0, computed_tokens=10.0, output_tokens=500)
    few = SiteSpec("here1", Place("here", 0.0, 0.0), 4000.0, 10**7, 10, 0.0)
    step_s = STEP_S * (1 + STEP_GROWTH * 10)
    assert site_capacity(few, shape) == pytest.approx(10 / (500 * step_s), rel=0.05)


def test_a_site_without_a_permit_left_refuses() -> None:
    site = SimSite(spec(max_inflight=2))
    asked = [admit(site, (Prefix(bytes([i]) * 16, 100),), 100, 10, 0.0) for i in range(3)]
    assert [job is not None for job in asked] == [True, True, False]


def test_a_decode_that_is_alone_takes_its_steps_and_a_prefill_beside_it_makes_them_longer() -> None:
    def decoded_s(others_tokens: int) -> float:
        site = SimSite(spec())
        job = admit(site, (Prefix(b"a" * 16, 100),), 100, 51, 0.0)
        assert job is not None
        if others_tokens:
            admit(site, (Prefix(b"b" * 16, others_tokens),), others_tokens, 1, 0.1)
        now = 0.0
        while job not in (ended := site.advance(now := site.next_event_at()))[1]:
            assert ended[0] or ended[1]
        assert job.first_token_at == pytest.approx(0.1)
        return now - job.first_token_at

    step_s = STEP_S * (1 + STEP_GROWTH)
    assert decoded_s(0) == pytest.approx(50 * step_s)
    chunk_s = CHUNK / SPEED + STEP_S * STEP_GROWTH  # each of four steps also computes a chunk of the other prompt
    assert decoded_s(4 * CHUNK) == pytest.approx(46 * step_s + 4 * chunk_s, rel=1e-3)


def test_what_a_misleading_site_publishes_is_not_what_is_true() -> None:
    def told(fault: Fault) -> tuple[int, int, float]:
        site = SimSite(spec(), fault)
        for i in range(5):
            admit(site, (Prefix(bytes([i]) * 16, 1000),), 1000, 100, 0.0)
        status = site.status(0.0, with_prefixes=True)
        return status.inflight, status.models[0].queued_tokens, status.models[0].prefill_tokens_per_s

    assert told("") == (5, 5000, pytest.approx(SPEED))
    assert told("says idle") == (0, 0, pytest.approx(SPEED))
    assert told("gray") == (5, 5000, pytest.approx(SPEED))
    gray = SimSite(spec(), "gray")
    admit(gray, (Prefix(b"a" * 16, 1000),), 1000, 1, 0.0)
    assert gray.next_event_at() == pytest.approx(GRAY * 1000 / SPEED)


def test_a_full_cache_gives_way_to_what_sequences_are_writing() -> None:
    site = SimSite(spec(kv_tokens=2000))
    for i in range(3):
        admit(site, (Prefix(bytes([i]) * 16, 600),), 600, 2, 100.0 * i)
    site.advance(1000.0)
    assert site.evicted_tokens == 0
    admit(site, (Prefix(b"z" * 16, 100),), 100, 400, 1000.0)
    assert site.evicted_tokens == 600
