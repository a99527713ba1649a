"""The limit of subrequests: per request or, while none is open, per second."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.isolates.isolate_work import IsolateWork
from pilotlight.functions.host.subrequests import OUTSIDE, OUTSIDE_S, Dial, Subrequests
from pilotlight.wire.tracing import CURRENT
from tests.clock import Clock

LIMIT = 3


class Counted:
    def __init__(self, *open_requests: int) -> None:
        self.clock = Clock(1000.0)
        self.work = IsolateWork()
        for id in open_requests:
            self.work.begin(id)
        self.subrequests = Subrequests(self._answer, LIMIT, self.work.requests, self.clock)
        self.asked: list[tuple[object, object]] = []
        self.spans: list[dict[str, str]] = []

    async def _answer(self, wanted: object, body: object) -> Any:
        self.asked.append((wanted, body))
        self.spans.append(dict(CURRENT.get()))
        return "answer"


async def refusal(counted: Counted, number: int, within: int) -> Failure | None:
    try:
        if number % 2:
            await counted.subrequests.dial(Dial("example.com", 443, within))
        else:
            await counted.subrequests.answer(cast(Any, SimpleNamespace(within=within)), None)
    except Failure as refused:
        return refused
    return None


async def refused_after(counted: Counted, within: int) -> int:
    """Return how many subrequests pass before one is refused."""
    for number in range(LIMIT + 1):
        if (refused := await refusal(counted, number, within)) is not None:
            assert (refused.code, refused.status) == ("too_many_subrequests", 429)
            assert f"has made {LIMIT} subrequests" in str(refused)
            return number
    raise AssertionError("none was refused")


async def test_each_request_has_its_own_and_a_new_one_under_its_id_begins_anew() -> None:
    counted = Counted(1, 2)
    assert [await refused_after(counted, id) for id in (1, 2)] == [LIMIT, LIMIT]
    counted.subrequests.forget(2)
    assert [await refused_after(counted, id) for id in (1, 2)] == [0, LIMIT]


@pytest.mark.parametrize("within", [OUTSIDE, 99, -7])
async def test_what_says_that_it_belongs_to_no_open_request_counts_against_one_that_is(within: int) -> None:
    counted = Counted(5)
    assert await refused_after(counted, within) == LIMIT
    assert await refused_after(counted, 5) == 0


async def test_without_an_open_request_a_second_has_as_many_as_a_request() -> None:
    counted = Counted()
    assert await refused_after(counted, 7) == LIMIT
    counted.clock.now += OUTSIDE_S
    assert await refused_after(counted, OUTSIDE) == 0
    counted.clock.now += 0.1
    assert await refused_after(counted, OUTSIDE) == LIMIT
    assert await refused_after(counted, OUTSIDE) == 0


async def test_a_subrequest_is_asked_with_its_body_and_within_the_span_of_its_request() -> None:
    counted, frame, body = Counted(1), cast(Any, SimpleNamespace(within=1)), cast(Any, object())
    token = CURRENT.set({"traceparent": "outer"})
    counted.subrequests.begin(1)
    CURRENT.reset(token)
    for forgets in (False, True):
        if forgets:
            counted.subrequests.forget(1)
        await asyncio.create_task(counted.subrequests.answer(frame, body))
        assert counted.asked[-1] == (frame, body)
    dial = Dial("example.com", 443, 1)
    await counted.subrequests.dial(dial)
    assert counted.asked[-1] == (dial, None)
    assert counted.spans == [{"traceparent": "outer"}, {}, {}]
