"""How long a site may be silent, by its own pace and by what the stream has been through."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from edge_router.asking import _Patience
from edge_router.exchange import MAX_MOVES, SETTLED_S, Exchange
from edge_router.pace import Pace, first_token_limit_s, stall_limit_s
from edge_router.peek import Head, ValidRequest, peek
from edge_router.policy import Preference, RouteRequest
from edge_router.retries import RetryBudget
from edge_router.upstream import Events, Lost, SiteFailed
from sites.network import RelayConfig
from tests.edge_router.builders import Clock, model_status, view

RELAY = RelayConfig(stall_s=2.0)
CLOCK_TICK_S = 0.01
INFINITE = float("inf")


def request() -> ValidRequest:
    head = Head("POST", "/v1/chat/completions", "/v1/chat/completions", [])
    body = b'{"model": "ember", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    return peek(head, body, "id", "secret", 4, lambda address, geo, is_hop: None, "1.2.3.4", None)


def moved(exchange: Exchange, *, told_for_s: float) -> None:
    exchange.cut("ams1", Lost("stalled", "it was silent"), exchange.told_at)
    exchange.went_on_at = exchange.told_at + 1
    exchange.told_at = exchange.went_on_at + told_for_s


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


def test_a_first_token_may_take_several_times_what_was_predicted_where_that_was_measured() -> None:
    measured = view(model={"prefill_tokens_per_s": 1000.0})
    terms = {"rtt": 1.0, "queue_ahead": 1000.0, "prefill": 999.0}
    assert first_token_limit_s(Preference(measured, 1.0, terms, "only"), "ember", 4.0) == 8.0
    assert first_token_limit_s(Preference(measured, 1.0, {}, "only"), "ember", 4.0) == 4.0
    asleep = view(model={"prefill_tokens_per_s": 1000.0, "residency": "disk"})
    for unknown in (view(), asleep):
        assert first_token_limit_s(Preference(unknown, 1.0, terms, "only"), "ember", 4.0) == INFINITE


def test_each_move_that_does_not_help_doubles_the_streams_patience_and_there_is_an_end_of_moves() -> None:
    exchange = Exchange(request(), RELAY, 0.0)
    exchange.told_at = 100.0
    limits = []
    for _ in range(3):
        limits.append(exchange.stall_s)
        moved(exchange, told_for_s=0.5)
    assert limits == [2.0, 4.0, 8.0]
    moved(exchange, told_for_s=SETTLED_S)
    assert exchange.stall_s == 2.0, "the move has helped"
    assert exchange.may_be_cut_again, "a move is no loss"
    for _ in range(MAX_MOVES - 4):
        assert exchange.may_move
        moved(exchange, told_for_s=SETTLED_S)
    assert not exchange.may_move
    assert not Exchange(request(), replace(RELAY, max_losses=0), 0.0).may_move


def test_each_site_that_is_silent_while_it_takes_over_leaves_the_next_one_twice_the_time() -> None:
    exchange = Exchange(request(), RELAY, 0.0)
    assert exchange.first_stall_s == 4.0
    exchange.cut("ams1", Lost("stalled", "it was silent"), 0.0)
    assert exchange.first_stall_s == 2.0
    exchange.failed("iad1", SiteFailed("silent", "it sent nothing"))
    assert exchange.first_stall_s == 4.0


def test_a_new_request_leaves_a_silent_site_only_for_another_one_and_with_its_next_try_paid_for() -> None:
    sites = [view("ams1"), view("iad1")]
    retries = RetryBudget(Clock())

    def rank(request: ValidRequest) -> tuple[RouteRequest, list[Preference]]:
        return RouteRequest("ember"), [Preference(site, 1.0, {}, "only") for site in sites]

    class Site:
        name = "ams1"

    pace, exchange, site = Pace(RELAY, rank, retries), Exchange(request(), RELAY, 0.0), Site()
    before = retries.left
    assert pace.may_leave(exchange, site)  # type: ignore[arg-type]
    assert exchange.is_paid
    assert retries.left == before - 1
    while retries.withdraw():
        pass
    assert not pace.may_leave(Exchange(request(), RELAY, 0.0), site)  # type: ignore[arg-type]
    sites.pop()
    assert not Pace(RELAY, rank, RetryBudget(Clock())).may_leave(Exchange(request(), RELAY, 0.0), site)  # type: ignore[arg-type]


def test_what_the_router_did_not_hear_while_it_stood_still_itself_is_no_silence_of_the_site() -> None:
    class Link:
        sink = None

        def fail(self, error: Exception) -> None:
            self.error = error

    link = Link()
    stream = Events(link, 60.0)  # type: ignore[arg-type]
    heard: list[float] = []

    def is_stalled(silent_s: float) -> bool:
        heard.append(silent_s)
        return silent_s > 2.0

    stream.is_stalled = is_stalled
    stream._waits_since = 100.0
    stream.look(112.0, awake_since=112.0)
    assert heard == [0.0]
    stream.look(114.5, awake_since=112.0)
    assert isinstance(link.error, Lost)
    assert link.error.cause == "stalled"


async def test_a_site_whose_heartbeats_come_is_not_left_before_its_first_token_and_a_silent_one_is() -> None:
    left: list[float] = []
    loop = asyncio.get_running_loop()

    def may_leave() -> bool:
        left.append(loop.time())
        return True

    patience = _Patience(60.0, None, 0.2, may_leave)
    begun = loop.time()
    async with asyncio.timeout(20):
        while loop.time() < begun + 0.5:
            patience.heard()
            assert not left
            await asyncio.sleep(0)
        while not patience.is_over:
            await asyncio.sleep(0.01)
    assert left[0] >= begun + 0.7 - CLOCK_TICK_S
