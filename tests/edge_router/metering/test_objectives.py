"""Objectives: which requests count, for which account and which period, also after a router's restart."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pilotlight.edge_router.forwarding.downstream import DownstreamGone
from pilotlight.edge_router.forwarding.relay import Cause
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.edge_router.forwarding.site_failure import StreamLost
from pilotlight.edge_router.metering.objectives import BUCKET_S, DAY_S, Objectives, ObjectiveState
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import ObjectiveConfig, RelayConfig
from pilotlight.wire.errors import ApiError
from tests.edge_router.builders import Clock, network
from tests.edge_router.fakes import (
    Router,
    answer,
    continued_stream,
    fall_silent,
    refuse,
    reset_it,
    routed_sites,
    router,
    sites,
)
from tests.edge_router.test_pace import request

EMBER = ObjectiveConfig(model="emb*", answered=0.9, first_token=0.5, first_token_ms=100.0)
TABLE = {"model": "emb*", "answered": 0.9, "first_token": 0.5, "first_token_ms": 60_000.0}

Ended = tuple[RequestState, BaseException | None, float]


def proxied(
    site: str = "ams1", *, status: int = 200, first_s: float | None = 0.05, wants_stream: bool = True
) -> RequestState:
    found = RequestState(replace(request(), wants_stream=wants_stream), RelayConfig(), 0.0)
    if status:
        found.answered_by(site, status, is_stream=first_s is not None, elapsed_s=first_s or 0.0)
    found.is_complete = status > 0
    return found


def lost_by(site: str) -> RequestState:
    found = proxied("iad1")
    cause: Cause = "reset"
    found.recovery.cut(site, StreamLost(cause, "it was reset"), 0.0)
    found.is_complete = False
    return found


def at(states: list[ObjectiveState], objective: str, site: str = "*") -> ObjectiveState:
    (found,) = [state for state in states if (state.objective, state.site) == (objective, site)]
    return found


@asynccontextmanager
async def objectives(clock: Clock, path: Path | None = None) -> AsyncIterator[Objectives]:
    counts = Objectives((EMBER,), path, clock)
    yield counts
    await counts.close()


@pytest.mark.parametrize(
    ("make", "judged"),  # `judged`: numbers of requests, failed requests, streams, late streams
    [
        (lambda: (proxied(), None, 1.0), (1, 0, 1, 0)),
        (lambda: (proxied(first_s=0.2), None, 1.0), (1, 0, 1, 1)),
        (lambda: (proxied(first_s=None, wants_stream=False), None, 9.0), (1, 0, 0, 0)),
        (lambda: (proxied(status=500, first_s=None), None, 1.0), (1, 1, 0, 0)),
        (lambda: (proxied(status=404, first_s=None), None, 1.0), (0, 0, 0, 0)),
        (lambda: (proxied(status=0), ApiError("no_site_available", "none"), 1.0), (1, 1, 0, 0)),
        (lambda: (proxied(status=0), ApiError("forbidden", "not yours"), 1.0), (0, 0, 0, 0)),
        (lambda: (proxied(status=0), ValueError("a bug"), 1.0), (1, 1, 0, 0)),
        (lambda: (lost_by("ams1"), None, 1.0), (1, 1, 1, 0)),
        (lambda: (proxied(), DownstreamGone(), 1.0), (1, 0, 1, 0)),
        (lambda: (proxied(status=0), asyncio.CancelledError(), 0.05), (0, 0, 0, 0)),
        (lambda: (proxied(status=0), asyncio.CancelledError(), 5.0), (1, 0, 1, 1)),
        (lambda: (proxied(status=0, wants_stream=False), DownstreamGone(), 5.0), (0, 0, 0, 0)),
    ],
    ids=[
        "in_time", "late", "whole", "site_failed", "clients_mistake", "no_site", "refused", "routers_bug", "lost_stream", "left_behind_a_token",
        "left_at_once", "left_in_vain", "left_a_whole_one",
    ],
)  # fmt: skip
async def test_a_request_is_judged_by_what_its_client_had(
    make: Callable[[], Ended], judged: tuple[int, int, int, int]
) -> None:
    async with objectives(Clock()) as counts:
        ended, error, took_s = make()
        counts.count(ended, "ember", error, took_s)
        counts.count(ended, "another", error, took_s)  # a model without an objective
        states = await counts.states()
        answered, first = at(states, "answered"), at(states, "first_token")
        assert (answered.requests, answered.bad, first.requests, first.bad) == judged


async def test_burn_rates_are_of_their_windows_and_the_budget_of_thirty_days() -> None:
    clock = Clock()
    clock.now = 1e9
    async with objectives(clock) as counts:
        counts.count(proxied(status=500, first_s=None), "ember", None, 1.0)
        clock.advance(DAY_S)
        for _ in range(3):
            counts.count(proxied(), "ember", None, 1.0)
        counts.count(proxied("iad1", first_s=0.3), "ember", None, 1.0)
        states = await counts.states()
        assert at(states, "answered").burn_rate == {"1h": 0.0, "6h": 0.0, "3d": pytest.approx(2.0)}
        assert at(states, "answered").budget_left == pytest.approx(-1.0)
        assert at(states, "first_token").burn_rate["1h"] == pytest.approx(0.5)
        assert at(states, "first_token", "iad1").burn_rate["1h"] == pytest.approx(2.0)
        assert at(states, "first_token", "ams1").budget_left == 1.0
        clock.advance(3600 + 2 * BUCKET_S)
        rates = at(await counts.states(), "first_token").burn_rate
        assert (rates["1h"], rates["6h"]) == (None, pytest.approx(0.5))
        clock.advance(31 * DAY_S)
        (answered, first) = await counts.states()
        assert (answered.requests, answered.budget_left, first.requests) == (0, 1.0, 0)


async def test_a_stream_that_was_lost_is_the_fault_of_the_site_that_lost_it() -> None:
    async with objectives(Clock()) as counts:
        counts.count(lost_by("ams1"), "ember", None, 1.0)
        assert at(await counts.states(), "answered", "ams1").bad == 1


async def test_counts_outlive_their_router_and_a_disk_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "objectives.sqlite", Clock()
    async with objectives(clock, path) as counts:
        counts.count(proxied(), "ember", None, 1.0)
        await counts.states()
        other = sqlite3.connect(path)
        other.execute("CREATE TRIGGER full BEFORE INSERT ON requests BEGIN SELECT RAISE(ABORT, 'no space left'); END")
        other.commit()
        for _ in range(2):
            counts.count(proxied(), "ember", None, 1.0)
            assert at(await counts.states(), "answered").requests == 1
        assert caplog.text.count("no space left") == 1
        other.execute("DROP TRIGGER full")
        other.commit()
        other.close()
    async with objectives(clock, path) as counts:
        assert at(await counts.states(), "answered").requests == 3


def test_objectives_that_promise_nothing_or_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = {"ams1": "http://127.0.0.1:1"}
    for tables, why in (
        ([{"model": "a"}], "needs answered"),
        ([{"model": "a", "first_token": 0.9}], "belong together"),
        ([{"model": "a", "answered": 1.0}], "answered"),
        ([{"model": "a", "answered": 0.9}, {"model": "a", "answered": 0.8}], "twice"),
    ):
        with pytest.raises(ConfigError, match=why):
            network(url, objectives=tables)


@asynccontextmanager
async def judging(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Router, list[Any]]]:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    tables = {"objectives": [TABLE], "ledger": {"directory": str(directory)}}
    async with routed_sites("ams1", "iad1", tables=tables) as (fakes, running):
        yield running, fakes


async def slo(running: Router) -> dict[tuple[str, str], tuple[int, int]]:
    async with running.http.get(running.url + "/slo") as response:
        assert response.status == 200, await response.read()
        states = (await response.json())["objectives"]
    return {(state["site"], state["objective"]): (state["requests"], state["bad"]) for state in states}


@pytest.mark.process
async def test_a_failover_fails_no_request_and_the_next_router_continues_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judging(tmp_path, monkeypatch) as (running, fakes):
        fakes[0].behave = continued_stream(8, until=5, ending=reset_it)
        fakes[1].behave = continued_stream(8)
        async with running.chat() as response:
            await response.read()
        assert await slo(running) == {
            ("*", "answered"): (1, 0),
            ("*", "first_token"): (1, 0),
            ("iad1", "answered"): (1, 0),
            ("iad1", "first_token"): (1, 0),
        }
    async with judging(tmp_path, monkeypatch) as (running, fakes):
        for fake in fakes:
            fake.behave = refuse("overloaded")
        async with running.chat() as response:
            assert response.status == 503
        for fake in fakes:
            fake.behave = answer(400, {"error": {"message": "no"}})
        async with running.chat() as response:
            assert response.status == 400
        found = await slo(running)
        assert (found["*", "answered"], found["", "answered"], found["*", "first_token"]) == ((2, 1), (1, 1), (1, 0))
        async with running.http.get(running.url + "/metrics") as response:
            text = await response.text()
        assert 'slo_budget_left{model="emb*",objective="answered",site="*"} -4.0' in text
        assert 'slo_burn_rate{model="emb*",objective="answered",site="*",window="1h"} 5.0' in text


@pytest.mark.process
async def test_a_client_that_leaves_a_stream_fails_no_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judging(tmp_path, monkeypatch) as (running, fakes):
        fakes[0].behave = continued_stream(8, until=3, ending=fall_silent)
        response = await running.chat()
        await response.content.readany()
        response.close()
        async with asyncio.timeout(60):
            while ("ams1", "answered") not in (found := await slo(running)):
                await asyncio.sleep(0.02)
        assert found["ams1", "answered"] == (1, 0)


@pytest.mark.process
async def test_without_objectives_the_router_says_where_they_would_be() -> None:
    async with sites("ams1") as fakes, router(fakes) as running, running.http.get(running.url + "/slo") as response:
        assert (response.status, "[[objectives]]" in await response.text()) == (404, True)
