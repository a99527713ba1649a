"""The product keeps its promises under faults in any order; further tests break each promise on purpose, to show that this is noticed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pilotlight.edge_router.backends.backend import Backend, Ticket
from pilotlight.edge_router.forwarding.relay import DeliveryLog
from pilotlight.edge_router.forwarding.upstream import UpstreamResponse
from tests.simulation.__main__ import unfinished
from tests.simulation.faults import PlannedFault
from tests.simulation.schedules import PlannedRequest, Schedule, draw, run
from tests.simulation.world import Heard

pytestmark = pytest.mark.long

BLOCKS, SCHEDULES = 2, 100
KILLED = PlannedFault(1.0, "kill the site", "ams1", 1.0)  # ams1 is the nearest site, which gets the request
CUT_OFF = PlannedFault(1.0, "cut the link", "ams1", 30.0)
CUT_OFF_FOR_EVER = CUT_OFF._replace(lasts_s=1000.0)


@pytest.mark.timeout(900)  # minutes on a busy machine
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_request_ends_once_with_its_own_tokens_and_nothing_is_held(block: int) -> None:
    seeds = range(block * SCHEDULES, (block + 1) * SCHEDULES)
    broken = {seed: found for seed in seeds if (found := run(draw(seed)))}
    assert not broken, "python -m tests.simulation --schedules 1 --seed N runs one of them again"


def one_stream(*faults: PlannedFault) -> Schedule:
    return Schedule(1, 1, "sin1", (PlannedRequest(0.0, LONG, "stream", 3, None),), faults)


LONG = 5  # the seed of an answer that takes several seconds


@pytest.mark.parametrize("fault", [KILLED, CUT_OFF])
def test_a_stream_whose_site_is_lost_is_whole(fault: PlannedFault) -> None:
    assert run(one_stream(fault)) == []


def test_a_client_that_leaves_at_once_needs_no_answer() -> None:
    assert run(one_stream(PlannedFault(0.0, "half of the clients leave", "ams1", 1.0))) == []


@pytest.mark.parametrize("router_pauses_at_s", [1.15, 1.25, 1.3])  # while a site is asked to continue the stream
def test_a_router_that_was_stopped_waits_for_the_site_that_continues_a_stream(router_pauses_at_s: float) -> None:
    faults = (
        PlannedFault(0.5, "kill the site", "iad1", 60.0),
        PlannedFault(1.0, "drain the site", "ams1", 1.0),
        PlannedFault(router_pauses_at_s, "suspend the router", "ams1", 29.0),
    )
    assert run(one_stream(*faults)) == []


def test_a_token_that_is_delivered_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeliveryLog, "delivery", lambda self: b"")
    assert any("other text" in sentence for sentence in run(one_stream(KILLED)))


def test_work_that_is_counted_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inflight = Backend.inflight

    @contextmanager
    def forgetful(self: Backend, *arguments: Any) -> Iterator[Ticket]:
        with inflight(self, *arguments) as ticket:
            yield ticket
        self.open.add(ticket)

    monkeypatch.setattr(Backend, "inflight", forgetful)
    assert any("the router counts" in sentence for sentence in run(one_stream()))


def stands_still(response: UpstreamResponse, now: float, awake_since: float) -> None:
    """Leave a silent stream alone for ever."""


def raises(response: UpstreamResponse, now: float, awake_since: float) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("look", "faults", "sentence"), [(stands_still, (CUT_OFF_FOR_EVER,), "no end"), (raises, (), "on purpose")]
)
def test_a_watch_that_overlooks_a_silent_stream_or_raises_is_noticed(
    look: Any, faults: tuple[PlannedFault, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UpstreamResponse, "look", look)
    assert any(sentence in broken for broken in run(one_stream(*faults)))


class Unreadable(Heard):
    def add(self, data: bytes) -> None:
        super().add(b"{" if self.seed == LONG else data)


def test_an_answer_that_its_client_cannot_read_is_noticed() -> None:
    assert any("was cut" in sentence for sentence in run(one_stream(), heard_by=Unreadable))


def test_a_seed_runs_the_same_steps_again() -> None:
    first: list[str] = []
    second: list[str] = []
    run(draw(0), first.append)
    run(draw(0), second.append)
    assert len(first) > 100
    assert first == second


def test_a_stopped_run_continues_with_what_is_left_or_was_broken_before() -> None:
    results = [
        {"seed": 0, "commit": "old", "broken": []},
        {"seed": 1, "commit": "old", "broken": ["a request has no end"]},
        {"seed": 2, "commit": "new", "broken": ["a request has no end"]},
    ]
    assert unfinished(range(4), results, "new") == [1, 3]
