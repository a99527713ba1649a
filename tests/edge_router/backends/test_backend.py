"""A site's state, round trip and the requests since its last status, with a clock that only tests move."""

import asyncio
from collections import Counter

import msgspec
import pytest
from msgspec.structs import asdict, replace

from pilotlight.edge_router.backends.backend import EJECT_AFTER, EJECTED_MAX_S, EJECTED_S, Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.backends.health import HealthMonitor, ProbeError, ProbeReply, status_fetch
from pilotlight.edge_router.backends.probed_state import RECOVER_AFTER, SLOW_START_S
from pilotlight.edge_router.backends.published_status import PublishedStatus
from pilotlight.edge_router.backends.rtt import RoundTrip, seed_rtt_ms
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_sessions import client_session, connection_trace, connector
from pilotlight.edge_router.routing.geo import distance_km
from pilotlight.sites.network import HealthConfig, RelayConfig
from pilotlight.support import background
from pilotlight.wire.hop.prefixes import encode_prefixes
from pilotlight.wire.hop.status import Place, SiteStatus, decode_status, encode_status
from tests.asgi import eventually
from tests.edge_router.builders import PLACES, Clock, model_status, network, site_status
from tests.edge_router.fakes import sites

HEALTH = HealthConfig(interval_s=1.0, timeout_s=0.05, unhealthy_after=3, stale_after_s=10.0)


class Probes:
    """A backend whose probes get the reply that a test sets: bytes, an exception, or None for silence."""

    def __init__(self) -> None:
        self.clock = Clock()
        net = network({"ams1": "http://127.0.0.1:1"}, health=asdict(HEALTH))
        self.backend: Backend = Discovery(net, self.clock).backends["ams1"]
        self.sequence = 0
        self.slept: list[float] = []
        self.chance = 0.5
        self.says: bytes | Exception | None = b""
        self._http_status = 200
        self._took_s = 0.0
        self.refusal = ""
        self.round_trips = 1
        self.monitor = HealthMonitor([self.backend], self._fetch, HEALTH, self.clock, self._sleep, lambda: self.chance)

    async def reply(self, reply: bytes | Exception | None, http_status: int = 200, took_s: float = 0.004) -> str:
        self.says, self._http_status, self._took_s = reply, http_status, took_s
        await self.monitor.probe(self.backend)
        return self.backend.state

    async def good(self, **fields: object) -> str:
        self.sequence += 1
        return await self.reply(encode_status(site_status("ams1", self.sequence, **fields)))

    async def bad(self) -> str:
        return await self.reply(ConnectionRefusedError("refused"))

    async def _fetch(self, url: str, site: str) -> ProbeReply:
        assert url == "http://127.0.0.1:1/status"
        self.clock.advance(self._took_s)
        if self.says is None:
            await asyncio.Event().wait()
        if isinstance(self.says, Exception):
            raise self.says
        assert self.says is not None
        return ProbeReply(self.says, self._http_status, self.round_trips, self.refusal)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) >= 3:
            await asyncio.Event().wait()

    async def pauses(self) -> list[float]:
        """Probe repeatedly; return the first three pauses, in seconds."""
        self.slept.clear()
        async with background.running(self.monitor.run, "probes"):
            await eventually(lambda: len(self.slept) == 3)
        return self.slept


async def test_the_first_good_probe_makes_a_site_healthy() -> None:
    site = Probes()
    assert site.backend.state == "unknown"
    assert await site.good() == "healthy"


async def test_a_site_in_doubt_is_probed_again_soon_and_a_lost_one_at_leisure() -> None:
    site = Probes()
    await site.good()
    site.says = ConnectionRefusedError("refused")
    assert await site.pauses() == pytest.approx([0.1, 0.1, 1.0])
    assert site.backend.state == "unhealthy"


async def test_a_site_is_unhealthy_only_after_failures_in_a_row() -> None:
    site = Probes()
    await site.good()
    assert [await site.bad(), await site.bad(), await site.good(), await site.bad(), await site.bad()] == [
        "healthy"
    ] * 5
    assert await site.bad() == "unhealthy"
    assert site.backend.detail == "refused"


async def test_a_site_that_refuses_our_signature_is_unhealthy_at_once_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Probes()
    await site.good()
    site.refusal = "signature"
    assert await site.reply(b"", 403) == await site.reply(b"", 403) == "unhealthy"
    assert "PILOTLIGHT_HOP_SECRET must be the same" in site.backend.detail
    assert len([record for record in caplog.records if "signature" in record.message]) == 1
    site.refusal = ""
    assert [await site.good(), await site.good(), site.backend.probed.refuses_hops] == ["unhealthy", "healthy", False]


async def test_a_flapping_site_must_answer_twice_before_it_is_trusted_again() -> None:
    site = Probes()
    await site.good()
    for _ in range(3):
        await site.bad()
    assert [await site.good(), await site.bad(), await site.good(), await site.good()] == [
        *["unhealthy"] * 3,
        "healthy",
    ]


async def test_a_site_that_starts_late_is_trusted_at_its_first_answer() -> None:
    site = Probes()
    for _ in range(5):
        await site.bad()
    assert await site.good() == "healthy"


async def test_draining_is_honoured_at_once_and_ends_with_the_next_life() -> None:
    site = Probes()
    await site.good()
    assert await site.good(draining=True) == "draining"
    assert await site.good() == "healthy"


async def test_a_site_that_refuses_a_request_because_it_drains_drains_until_its_status_says_otherwise() -> None:
    site = Probes()
    await site.good()
    assert site.backend.view().state == "healthy"
    site.backend.refused_draining()
    assert (site.backend.state, site.backend.detail) == ("draining", "the site is draining")
    assert site.backend.view().state == "draining", "at once"
    assert await site.good() == "healthy"


async def test_a_draining_site_that_stops_answering_is_unhealthy() -> None:
    site = Probes()
    await site.good(draining=True)
    assert [await site.bad(), await site.bad(), await site.bad()] == ["draining", "draining", "unhealthy"]


async def test_a_site_that_is_not_ready_gets_nothing_and_returns_at_once() -> None:
    site = Probes()
    assert await site.good(ready=False) == "unhealthy"
    assert "not ready" in site.backend.detail
    assert await site.good() == "healthy"


@pytest.mark.parametrize(
    ("reply", "http_status", "reason"),
    [(b"<html>", 200, "malformed"), (b'{"site": "ams1"}', 200, "malformed"), (b"{}", 500, "answered 500"),
     (encode_status(site_status("iad1")), 200, "has the name 'iad1'"), (None, 200, "did not answer within"),
     (ValueError("a bug"), 200, "the router failed to probe it")],
)  # fmt: skip
async def test_anything_but_a_status_is_a_failed_probe_with_its_reason(
    reply: bytes | Exception | None, http_status: int, reason: str
) -> None:
    site = Probes()
    await site.good()
    for _ in range(3):
        await site.reply(reply, http_status)
    assert site.backend.state == "unhealthy"
    assert reason in site.backend.detail


async def test_failed_connections_count_like_failed_probes() -> None:
    site = Probes()
    await site.good()
    for _ in range(3):
        site.backend.failed("cannot connect")
    assert site.backend.state == "unhealthy"


async def test_a_status_overtaken_by_a_newer_one_is_ignored_and_a_restart_is_not() -> None:
    site = Probes()
    await site.reply(encode_status(site_status("ams1", sequence=5, inflight=5)))
    await site.reply(encode_status(site_status("ams1", sequence=4, inflight=4)))
    assert site.backend.status is not None
    assert site.backend.status.inflight == 5
    await site.reply(encode_status(site_status("ams1", sequence=1, inflight=1, pid=2)))
    assert site.backend.status.inflight == 1


async def test_a_status_grows_stale() -> None:
    site = Probes()
    await site.good()
    assert site.backend.view().status_is_fresh
    site.clock.advance(10.5)
    assert not site.backend.view().status_is_fresh
    assert site.backend.view().status is not None


async def test_probes_measure_the_round_trip() -> None:
    site = Probes()
    assert site.backend.round_trip.ms == pytest.approx(site.backend.round_trip.seed_ms)
    await site.reply(encode_status(site_status("ams1")), took_s=0.012)
    assert site.backend.round_trip.ms == pytest.approx(12.0)
    site.round_trips = 2  # one to connect, one for the probe
    await site.reply(encode_status(site_status("ams1", 2)), took_s=0.012)
    assert site.backend.round_trip.ms == pytest.approx(9.0), "half way to the measured 6 ms"


async def test_the_loop_is_jittered_and_quicker_while_a_site_starts() -> None:
    site = Probes()
    site.says = ConnectionRefusedError()
    site.chance = 1.0
    assert await site.pauses() == pytest.approx([0.3, 0.3, 0.3])
    await site.good()
    site.chance = 0.0
    assert await site.pauses() == pytest.approx([0.8, 0.8, 0.8])


async def test_of_thousands_of_sites_a_thousand_are_asked_in_a_second() -> None:
    asked, slept = [], []
    waiting = asyncio.Event()

    async def fetch(url: str, site: str) -> ProbeReply:
        asked.append(url)
        raise ConnectionRefusedError("refused")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await waiting.wait()

    net = network({f"s{i}": f"http://127.0.0.1:{i + 1}" for i in range(5000)}, health=asdict(HEALTH))
    backends = Discovery(net, Clock()).backends.values()
    task = asyncio.create_task(HealthMonitor(backends, fetch, HEALTH, Clock(), sleep, lambda: 0.5).run())
    while len(slept) < 5000:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(asked) == 1001
    # The other sites are probed later, spread over the next four seconds; from then on each is probed every 5 s.
    assert sorted(slept)[-1001:] == pytest.approx([5.0] * 1001)
    assert sum(1 < seconds <= 2 for seconds in slept) == pytest.approx(1000, abs=1)


async def test_a_site_whose_status_cannot_be_taken_in_keeps_no_other_from_being_probed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = network({"ams1": "http://127.0.0.1:1", "iad1": "http://127.0.0.1:2"}, health=asdict(HEALTH))
    asked, both = Counter[str](), asyncio.Event()

    class Failing(Backend):
        def answered(self, status: SiteStatus, asked_at: float) -> None:
            if self.name == "ams1":
                raise ZeroDivisionError("of what it published")
            super().answered(status, asked_at)

    backends = {site.name: Failing(site, RoundTrip(1.0), HEALTH, Clock()) for site in net.sites}

    async def fetch(url: str, site: str) -> ProbeReply:
        asked[site] += 1
        if min(asked["ams1"], asked["iad1"]) >= 3:
            both.set()
        return ProbeReply(encode_status(site_status(site, asked[site])), 200, 1)

    monitor = HealthMonitor(backends.values(), fetch, HEALTH, Clock(), lambda seconds: asyncio.sleep(0))
    async with background.running(monitor.run, "probes"), asyncio.timeout(60):
        await both.wait()
    assert (backends["ams1"].state, backends["iad1"].state) == ("unhealthy", "healthy")
    assert "of what it published" in caplog.text


def test_inflight_is_a_scope_and_pending_ends_with_the_first_byte() -> None:
    backend = Probes().backend
    with backend.inflight(100) as first, backend.inflight(30):
        assert backend.view().outstanding == 2
        assert backend.view().pending_requests == 2
        assert backend.view().pending_tokens == 130
        first.answering()
        assert backend.view().outstanding == 2
        assert backend.view().pending_requests == 1
        assert backend.view().pending_tokens == 30
    with pytest.raises(RuntimeError), backend.inflight(5):
        raise RuntimeError
    assert (backend.view().outstanding, backend.view().pending_requests, backend.view().pending_tokens) == (0, 0, 0)


def test_a_status_absorbs_what_was_sent_before_it_was_asked_for() -> None:
    site = Probes()
    backend = site.backend
    with backend.inflight(100):
        site.clock.advance(1)
        asked_at = site.clock()
        site.clock.advance(0.01)
        with backend.inflight(30):
            backend.answered(site_status("ams1"), asked_at)
            assert (backend.view().pending_requests, backend.view().pending_tokens) == (1, 30)
        assert backend.view().pending_tokens == 0


def test_the_seed_is_line_of_sight_over_fibre_with_a_detour() -> None:
    assert distance_km(PLACES["ams1"], PLACES["iad1"]) == pytest.approx(6190, rel=0.02)
    assert seed_rtt_ms(PLACES["ams1"], PLACES["iad1"]) == pytest.approx(2 * 6190 / 204 * 2.1, rel=0.02)
    assert 0 < seed_rtt_ms(PLACES["ams1"], PLACES["ams1"]) < 1


def test_the_other_side_of_the_earth_is_half_its_circumference_away_wherever_one_stands() -> None:
    for latitude in range(-90, 91):
        for longitude in (-180.0, -77.5, 0.0, 4.76):
            here, there = Place("a", latitude, longitude), Place("b", -latitude, longitude + 180.0)
            assert distance_km(here, there) == pytest.approx(20_015, rel=0.001)
            assert distance_km(here, here) == 0.0


def test_the_estimate_falls_at_once_and_rises_slowly() -> None:
    trip = RoundTrip(128.0)
    trip.observe(10.0)
    assert trip.ms == 10.0
    trip.observe(60.0)
    assert trip.ms == pytest.approx(12.5)
    trip.observe(8.5)
    assert trip.ms == pytest.approx(10.5)
    for _ in range(200):
        trip.observe(50.0)
    assert trip.ms == pytest.approx(50.0, abs=0.1)


@pytest.mark.process
async def test_only_a_new_connection_costs_a_second_round_trip() -> None:
    async with (
        sites("ams1") as [site],
        connector() as tcp,
        client_session(tcp, RelayConfig(), connection_trace()) as session,
    ):
        fetch = status_fetch(session)
        fetched = [await fetch(site.url + "/status", "ams1") for _ in range(3)]
        assert [(reply.http_status, reply.round_trips) for reply in fetched] == [(200, 2), (200, 1), (200, 1)]
        site.secret = "s" * 32
        fetch = status_fetch(session, site.secret, SiteClocks(["ams1"]))
        assert (await fetch(site.url + "/status?digests=7", "ams1")).http_status == 200  # the query is signed, too
        site.clock_ahead_s = 3600.0
        refused, known = [await fetch(site.url + "/status", "ams1") for _ in range(2)]
        assert (refused.http_status, refused.round_trips) == (200, 2), "it was asked again, by the site's own clock"
        assert (known.http_status, known.round_trips) == (200, 1)
        site.status_body = b" " * (5 << 20)
        with pytest.raises(ProbeError, match="larger than"):
            await fetch(site.url + "/status", "ams1")


def test_a_site_status_without_aliases_is_still_read() -> None:
    raw = msgspec.json.decode(encode_status(site_status("ams1")))
    del raw["models"][0]["aliases"]
    assert decode_status(msgspec.json.encode(raw)).models[0].aliases == ()


def test_a_site_that_declines_corrects_what_is_known_of_its_queue_and_of_what_was_sent_before() -> None:
    clock = Clock()
    backend = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends["ams1"]
    backend.declined("ember", 700, clock())  # without a status there is nothing to correct
    assert backend.view().status is None
    backend.answered(site_status("ams1", models=(model_status(), model_status("other", queued_tokens=5))), clock())
    with backend.inflight(100) as earlier:
        clock.advance(0.5)
        with backend.inflight(10) as ticket:
            backend.declined("ember", 700, ticket.sent_at)
            ticket.answering()
            seen = backend.view()
            assert seen.status is not None
            assert [model.queued_tokens for model in seen.status.models] == [700, 5]
            assert (seen.status_at_s, seen.pending_tokens) == (ticket.sent_at, 0)
            earlier.answering()
    assert backend.view().pending_requests == 0


@pytest.mark.parametrize("asked", ["ember", "@x/ember", "ember:french", "@x/ember:french"])
def test_a_decline_corrects_the_queue_of_the_model_by_any_name_and_with_any_adapter(asked: str) -> None:
    clock = Clock()
    backend = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends["ams1"]
    backend.answered(site_status("ams1", models=(model_status(aliases=("@x/ember",)), model_status("other"))), clock())
    backend.declined(asked, 700, clock())
    assert backend.status is not None
    assert [model.queued_tokens for model in backend.status.models] == [700, 0]


def test_a_decline_does_not_age_the_knowledge_of_a_site() -> None:
    """A declined request may have been sent long before, because a body of many images takes seconds. Probes continue meanwhile."""
    clock = Clock()
    backend = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends["ams1"]
    backend.answered(site_status("ams1", 1), clock())
    with backend.inflight(100) as ticket:
        clock.advance(HEALTH.stale_after_s)
        asked_at = clock()
        backend.answered(site_status("ams1", 2), asked_at)
        clock.advance(0.5)
        with backend.inflight(10):
            backend.declined("ember", 700, ticket.sent_at)
            seen = backend.view()
            assert seen.status is not None
            assert seen.status.models[0].queued_tokens == 700
            assert (seen.status_is_fresh, seen.status_at_s, seen.pending_tokens) == (True, asked_at, 10)
        ticket.refused()


def fail_in_a_row(backend: Backend, times: int) -> None:
    for _ in range(times):
        with backend.inflight(1):
            pass  # no byte of a response arrives


def test_a_site_that_only_fails_is_asked_ever_more_seldom_up_to_a_bound_until_it_answers() -> None:
    probes = Probes()
    backend, clock = probes.backend, probes.clock
    fail_in_a_row(backend, EJECT_AFTER - 1)
    assert not backend.view().is_ejected
    waits: list[float] = []
    for _ in range(6):
        fail_in_a_row(backend, EJECT_AFTER if waits else 1)
        began = clock.now
        while backend.view().is_ejected:
            clock.advance(1.0)
        waits.append(clock.now - began)
    assert waits == [EJECTED_S, 2 * EJECTED_S, 4 * EJECTED_S, 8 * EJECTED_S, EJECTED_MAX_S, EJECTED_MAX_S]
    with backend.inflight(1) as ticket:
        ticket.refused()
    fail_in_a_row(backend, EJECT_AFTER)
    clock.advance(EJECTED_S)
    assert not backend.view().is_ejected


def test_a_client_that_leaves_is_no_failure_of_the_site() -> None:
    backend = Probes().backend
    for _ in range(EJECT_AFTER):
        with pytest.raises(KeyError), backend.inflight(1):
            raise KeyError
    assert (backend.view().is_ejected, backend.outstanding) == (False, 0)


async def test_a_site_that_comes_back_is_given_its_share_little_by_little() -> None:
    probes = Probes()
    await probes.good()
    assert probes.backend.view().slow_start == 1.0
    for _ in range(HEALTH.unhealthy_after):
        await probes.bad()
    for _ in range(RECOVER_AFTER):
        await probes.good()
    shares = []
    for _ in range(5):
        shares.append(probes.backend.view().slow_start)
        probes.clock.advance(SLOW_START_S / 4)
    assert shares == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


async def test_an_operators_cordon_lets_a_healthy_site_drain_and_says_so() -> None:
    probes = Probes()
    backend = probes.backend
    backend.cordon("drained by an operator")
    assert (backend.state, backend.detail) == ("unknown", "not yet asked")
    await probes.good()
    assert backend.state == "draining"
    assert backend.detail == "drained by an operator"
    assert backend.view().state == "draining"
    backend.cordon("")
    assert (backend.state, backend.detail, backend.view().state) == ("healthy", "", "healthy")


async def test_a_site_is_in_doubt_between_its_first_failed_probe_and_its_loss_and_frozen_from_then_on() -> None:
    probes = Probes()
    seen = []
    for act in (probes.bad, probes.good, probes.bad, probes.bad, probes.bad, probes.good, probes.good):
        await act()
        seen.append((probes.backend.is_in_doubt, probes.backend.is_frozen))
    assert seen == [
        (False, False),
        (False, False),
        (True, False),
        (True, False),
        (False, True),
        (False, True),
        (False, False),
    ]
    probes.backend.refused_hop("the clocks differ")
    assert (probes.backend.state, probes.backend.is_frozen) == ("unhealthy", False), "it answers"
    await probes.good(ready=False)
    assert (probes.backend.state, probes.backend.is_frozen) == ("unhealthy", False)


async def test_requests_that_wait_hear_of_their_sites_loss_once_and_those_that_are_answered_do_not() -> None:
    probes = Probes()
    await probes.good()
    heard: list[str] = []
    backend = probes.backend
    with (
        backend.inflight(1, heard.append) as waiting,
        backend.inflight(1, heard.append) as answered,
        backend.inflight(1),
    ):
        answered.answering()
        for _ in range(HEALTH.unhealthy_after - 1):
            backend.failed("gone")
        assert heard == []
        backend.failed("gone")
        assert heard == ["gone"]
        waiting.refused()
        backend.failed("gone")
        assert heard == ["gone"]


def told(sequence: int, digests: int, since: int, *digests_of: tuple[set[int], set[int]]) -> SiteStatus:
    models = tuple(
        replace(model_status(f"m{i}"), prefixes=encode_prefixes(came), prefixes_dropped=encode_prefixes(gone))
        for i, (came, gone) in enumerate(digests_of)
    )
    return replace(site_status("ams1", sequence), models=models, digests=digests, digests_since=since)


def test_what_a_site_caches_is_known_by_whole_digests_and_by_changes_to_the_edition_that_is_known() -> None:
    published = PublishedStatus()
    steps: tuple[tuple[SiteStatus, int, set[int]], ...] = (
        (told(1, 5, 0, ({1, 2}, set()), ({2, 3}, set())), 5, {1, 2, 3}),
        (told(2, 6, 5, ({4}, {1}), (set(), {3})), 6, {2, 4}),
        (told(3, 6, 6, (set(), set()), (set(), set())), 6, {2, 4}),
        # changes since an unknown revision: the next probe requests the whole digest
        (told(4, 9, 8, ({7}, set())), 0, {2, 4}),
        (told(5, 9, 0, ({7}, set())), 9, {7}),
        (replace(told(6, 10, 0), models=(replace(model_status("m"), prefixes=b"x"),)), 0, set()),
        (told(7, 11, 0, ({8}, set())), 11, {8}),
    )
    for status, digests, prefixes in steps:
        assert published.take(status, 1.0)
        assert (published.digests, published.prefixes) == (digests, prefixes)
        assert not any(model.prefixes or model.prefixes_dropped for model in published.status.models)
    assert not published.take(told(6, 12, 0, ({9}, set())), 2.0), "it is older"
    assert (published.digests, published.at) == (11, 1.0)
