"""The phases of recent generations."""

import time
from typing import Any

import msgspec
import pytest

from pilotlight.runtime.telemetry.recent_generations import KEPT, GenerationClock, RecentGenerations
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import Hop, sign_hop
from pilotlight.wire.hop.management import REQUESTS_PATH, GenerationTimes
from pilotlight.wire.hop.usage import ResourceUse
from tests.asgi import call
from tests.runtime.conftest import SiteMaker

SECRET = "a shared secret"


async def test_a_router_reads_the_phases_of_answers(make_site: SiteMaker) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    async with make_site(hop_secret=SECRET) as site:
        answer = await call(site.app, "/v1/chat/completions", body)
        hop = sign_hop(SECRET, time.time(), Hop("GET", REQUESTS_PATH, "r1", "ams1"), b"")
        found = await call(site.app, REQUESTS_PATH, method="GET", body=b"", x_pilotlight_hop=hop, x_request_id="r1")
        (times,) = msgspec.json.decode(found.body, type=list[GenerationTimes])
        usage = answer.json["usage"]
        assert (times.model, times.outcome) == ("tiny", answer.json["choices"][0]["finish_reason"])
        assert (times.prompt_tokens, times.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (await call(site.app, REQUESTS_PATH, method="GET", body=b"")).status == 403


def test_a_generation_that_did_not_come_far_has_its_time_in_the_phase_that_it_reached() -> None:
    recent = RecentGenerations()

    def fail() -> None:
        with recent.timed("m") as clock:
            clock.awake()
            raise ApiError("overloaded", "no room")

    with pytest.raises(ApiError):
        fail()
    (times,) = recent.times
    assert times.outcome == "overloaded"
    assert (times.queue_ms, times.prefill_ms, times.decode_ms) == (0.0, 0.0, 0.0)


def test_phases_add_up_to_the_whole_whatever_the_engine_says_of_its_queue() -> None:
    clock = GenerationClock()
    clock.awake()
    clock.submitted()
    now = time.time_ns()
    clock.computed(ResourceUse(3, 1, 2), "stop", first_output_ns=now, queue_us=10**9)
    times = clock.times("m", None)
    assert (times.outcome, times.cached_tokens, times.prefill_ms) == ("stop", 1, 0.0)
    assert times.queue_ms >= 0


def test_only_the_newest_are_kept() -> None:
    recent = RecentGenerations()
    for _ in range(KEPT + 1):
        with recent.timed("m"):
            pass
    assert len(recent.times) == KEPT
