"""The longest permitted silence of a site, by its own pace and by the stream's history."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.forwarding.relay import DeliveryLog
from pilotlight.edge_router.forwarding.request_state import MAX_MOVES, SETTLED_S, RequestState
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost
from pilotlight.edge_router.forwarding.timeouts import AttemptLimits
from pilotlight.edge_router.forwarding.upstream import SiteConnections, UpstreamAttempt
from pilotlight.edge_router.requests.request import Head, RequestParser, ValidRequest
from pilotlight.edge_router.routing.selection import first_token_limit_s, stall_limit_s
from pilotlight.edge_router.routing.views import Preference
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.hop.continuation import ResumePoint
from pilotlight.wire.sse import HEARTBEAT
from tests.asgi import eventually
from tests.edge_router.builders import model_status, view
from tests.edge_router.fakes import marked_event

RELAY = RelayConfig(stall_s=2.0)
LIMITS = AttemptLimits(60.0, 10.0, is_continuation=False)
INFINITE = float("inf")


def request() -> ValidRequest:
    head = Head("POST", "/v1/chat/completions", "/v1/chat/completions", [])
    body = b'{"model": "ember", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    return RequestParser("secret", 4, lambda address, geo, is_hop: None).parse(head, body, "id", "1.2.3.4")


def moved(proxied: RequestState, *, told_for_s: float) -> None:
    recovery = proxied.recovery
    proxied.cut("ams1", StreamLost("stalled", "it was silent"), recovery.delivered_at)
    assert recovery.delivered(recovery.delivered_at + 1) == 1
    assert recovery.delivered(recovery.delivered_at + told_for_s) is None


@pytest.mark.parametrize(
    ("model", "limit_s"),
    [
        (None, 2.0),
        (model_status(), 2.0),
        (model_status(decode_tokens_per_s=100.0), 2.0),
        (model_status(decode_tokens_per_s=5.0), 10.0),
        (model_status(prefill_tokens_per_s=1000.0, queued_tokens=3000), 5.0),
    ],
)
def test_a_site_may_be_silent_for_many_times_its_own_pace_and_for_its_queue(model: Any, limit_s: float) -> None:
    assert stall_limit_s(model, 2.0) == limit_s


def test_a_first_token_may_take_several_times_a_measured_prediction() -> None:
    measured = view(model={"prefill_tokens_per_s": 1000.0})
    terms = {"rtt": 1.0, "queue_ahead": 1000.0, "prefill": 999.0}
    assert first_token_limit_s(Preference(measured, 1.0, terms, "only"), "ember", 4.0) == 8.0
    assert first_token_limit_s(Preference(measured, 1.0, {}, "only"), "ember", 4.0) == 4.0
    asleep = view(model={"prefill_tokens_per_s": 1000.0, "residency": "disk"})
    for unknown in (view(), asleep):
        assert first_token_limit_s(Preference(unknown, 1.0, terms, "only"), "ember", 4.0) == INFINITE


def test_each_move_that_does_not_help_doubles_the_streams_patience_and_there_is_an_end_of_moves() -> None:
    proxied = RequestState(request(), RELAY, 0.0)
    proxied.recovery.delivered(100.0)
    limits = []
    for _ in range(3):
        limits.append(proxied.recovery.stall_s)
        moved(proxied, told_for_s=0.5)
    assert limits == [2.0, 4.0, 8.0]
    moved(proxied, told_for_s=SETTLED_S)
    assert proxied.recovery.stall_s == 2.0, "the move has helped"
    assert proxied.recovery.may_be_cut_again, "a move is not a loss"
    for _ in range(MAX_MOVES - 4):
        assert proxied.recovery.may_move
        moved(proxied, told_for_s=SETTLED_S)
    assert not proxied.recovery.may_move
    assert not RequestState(request(), replace(RELAY, max_losses=0), 0.0).recovery.may_move


def test_each_site_that_is_silent_while_it_takes_over_leaves_the_next_one_twice_the_time() -> None:
    proxied = RequestState(request(), RELAY, 0.0)
    assert proxied.first_stall_s == 4.0
    proxied.cut("ams1", StreamLost("stalled", "it was silent"), 0.0)
    assert proxied.first_stall_s == 2.0
    proxied.tries.failed("iad1", SiteFailed("silent", "it sent nothing"))
    assert proxied.first_stall_s == 4.0


class _Pace:
    """A pace by which a request leaves at once and a stream stalls after 2 s."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def may_leave(self) -> bool:
        self.asked.append(0.0)
        return True

    def may_move(self) -> bool:
        return True

    def is_frozen(self) -> bool:
        return False

    def is_stalled(self, silent_s: float) -> bool:
        self.asked.append(silent_s)
        return silent_s > 2.0


@asynccontextmanager
async def silent_site(said: bytes = b"") -> AsyncIterator[tuple[SiteConnections, str]]:
    """Yield connections to a site that takes a request, sends `said` and then nothing. The watch is not running."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"hello")
        writer.write(said)
        await asyncio.gather(reader.read(), return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = SiteConnections(RELAY, "", SiteClocks([]))
    async with asyncio.timeout(60), server:
        yield upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstream.pool.close()
        await ended.wait()


@pytest.mark.process
async def test_a_site_is_left_before_its_first_token_when_it_has_been_silent_for_long_and_not_before() -> None:
    pace = _Pace()
    async with silent_site() as (upstream, url):
        attempt = UpstreamAttempt(upstream, "ams1", url, request(), LIMITS, pace, DeliveryLog())
        waiting = asyncio.ensure_future(attempt.response())
        while not upstream.pool.num_open:
            await asyncio.sleep(0.001)
        started = time.monotonic()
        attempt.look(started + LIMITS.stall_s - 1, float("-inf"))
        attempt.look(started + LIMITS.stall_s + 1, started + 2)
        assert not pace.asked
        attempt.look(started + LIMITS.stall_s + 1, float("-inf"))
        assert len(pace.asked) == 1
        with pytest.raises(SiteFailed) as failed:
            await waiting
        assert failed.value.kind == "silent"


@pytest.mark.process
async def test_a_heartbeat_is_as_good_as_a_word_for_a_site_before_its_first_token() -> None:
    pace = _Pace()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with silent_site(head + HEARTBEAT) as (upstream, url):
        attempt = UpstreamAttempt(upstream, "ams1", url, request(), LIMITS, pace, DeliveryLog())
        started = attempt.heard_at
        waiting = asyncio.ensure_future(attempt.response())
        await eventually(lambda: attempt.heard_at > started)
        attempt.look(started + LIMITS.stall_s, float("-inf"))
        assert not pace.asked
        attempt.look(attempt.heard_at + LIMITS.stall_s, float("-inf"))
        assert pace.asked
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.process
async def test_a_site_whose_time_is_over_as_its_first_events_come_has_answered() -> None:
    """Events that have arrived count as delivered. If another site sent its first events, too, they would be there twice."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-pilotlight-marks: 1\r\n\r\n"

    class Late(DeliveryLog):
        """Runs out of time as it records the first token."""

        def add(self, point: ResumePoint) -> None:
            super().add(point)
            attempt.look(time.monotonic() + 1000, float("-inf"))

    async with silent_site(head + marked_event(0)) as (upstream, url):
        attempt = UpstreamAttempt(upstream, "ams1", url, request(), LIMITS, _Pace(), Late())
        with await attempt.response() as response:
            assert (response.status, response.has_answered) == (200, True)
