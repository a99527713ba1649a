"""A stream whose site is lost continues at the next one with each token once, however the site was lost (I1, I3, I6)."""

import asyncio
import json
import time
from typing import Any

import pytest

from pilotlight.edge_router.forwarding.timeouts import LOOK_AGAIN_S
from pilotlight.wire.hop.continuation import (
    ANSWER,
    DRAIN_NOTICE,
    ResumePoint,
    decode_answer,
    decode_delivery,
    with_resume_point,
)
from pilotlight.wire.hop.headers import HOP, Hop, hop_is_genuine
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import (
    DONE,
    Ending,
    FakeSite,
    FirstThen,
    Router,
    answer,
    continued_stream,
    end_it,
    event,
    fall_silent,
    hang,
    last_error,
    marked_event,
    raw_stream,
    reset_before_first_byte,
    reset_it,
    routed_sites,
    router,
    sites,
    stream_of,
    write_and_end,
    write_and_wait,
)

pytestmark = pytest.mark.process

SECRET = "s3cret"
COUNT = 6
WHOLE = b"".join(event(i) for i in range(COUNT)) + DONE
FAILED = b'data: {"error": {"message": "the engine died", "code": "engine_error"}}\n\n'
UNLOADED = b'data: {"error": {"message": "the disk is full", "code": "model_load_failed"}}\n\n'
FAILED_WORKERS_AI = b'data: {"errors": [{"code": 5000, "message": "the engine died"}], "success": false}\n\n'


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", SECRET)


def counts(running: Router) -> dict[str, float]:
    """Return the numbers of disturbed, continued and lost streams of all sites."""
    totals: dict[str, float] = {}
    for metric in running.proxy.metrics.registry.collect():
        if metric.name.startswith("pilotlight_router_streams_"):
            name = metric.name.removeprefix("pilotlight_router_streams_")
            totals[name] = sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))
    return totals


LOSSES: dict[str, tuple[Ending, str]] = {
    "reset": (reset_it, "closed"),
    "ended without its end": (end_it, "closed"),
    "half an event": (write_and_end(marked_event(3)[:-4]), "closed"),
    "an event without its resume point": (write_and_end(event(3)), "closed"),
    "silent": (fall_silent, "silent"),
    "silent after half an event": (write_and_wait(marked_event(3)[:20]), "silent"),
    "its own error event": (write_and_end(FAILED), "error"),
    "it cannot load the model again": (write_and_end(UNLOADED), "error"),
    "its own error event after an event without resume point": (write_and_end(event(3) + FAILED), "error"),
    "its own error event in the other dialect": (write_and_end(FAILED_WORKERS_AI), "error"),
    "drains": (write_and_wait(DRAIN_NOTICE), "draining"),
    "a resume point that is not a list": (write_and_wait(b":pl [{]\n" + event(3)), "malformed"),
    "a resume point with a negative token": (write_and_wait(b":pl [0,[-1]]\n" + event(3)), "malformed"),
    "a resume point with a text for a token": (write_and_wait(b':pl [0,["x"]]\n' + event(3)), "malformed"),
    "a resume point of choice 5000": (write_and_wait(b":pl [5000,[1]]\n" + event(3)), "malformed"),
    "an endless event": (write_and_wait(b"data: " + b"x" * (5 << 20)), "malformed"),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_stream_continues_with_the_next_token_after_any_fault_of_its_site(loss: str) -> None:
    ending, cause = LOSSES[loss]
    async with routed_sites("ams1", "iad1", idle_timeout_s=0.6) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=3, ending=ending)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat(headers={"x-request-id": "mine"}) as response:
            body = await response.read()
        assert body == WHOLE
        assert counts(running) == {"disturbed": 1, "continued": 1, "lost": 0}
        assert running.counted("pilotlight_router_streams_disturbed_total", site="ams1", cause=cause) == 1
        assert running.counted("pilotlight_router_continuation_delay_seconds_count") == 1
        assert running.counted("pilotlight_router_requests_total", site="iad1", outcome="ok") == 1
        first, second = fakes[0].seen[0], fakes[1].seen[0]
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
        name, nothing = decode_answer(first.headers[ANSWER])
        again, length = decode_answer(second.headers[ANSWER])
        assert (name, nothing) == (again, 0)
        (choice,) = decode_delivery(fakes[1].bodies[0][:length]).choices
        assert choice.token_ids == (100, 101, 102)
        assert fakes[1].bodies[0][length:] == fakes[0].bodies[0], "the client's own body follows unchanged"
        await running.until(lambda: fakes[0].active == 0)


async def test_a_loss_before_the_first_mark_begins_the_same_answer_anew() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=0, ending=write_and_end(event(0)))
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            assert await response.read() == WHOLE
        assert fakes[0].seen[0].headers[ANSWER] == fakes[1].seen[0].headers[ANSWER]


async def test_a_second_and_a_third_failure_during_recovery_cost_only_time() -> None:
    async with routed_sites("ams1", "iad1", "sin1", connect_timeout_s=0.2) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=2, ending=reset_it)
        fakes[1].behave = reset_before_first_byte
        fakes[2].behave = continued_stream(COUNT, until=4, ending=reset_it)

        async def serve_again() -> None:
            """Let the first site answer again while the third one serves the stream."""
            await fakes[2].asked.wait()
            fakes[0].behave = continued_stream(COUNT)

        back = asyncio.ensure_future(serve_again())
        async with running.chat() as response:
            assert await response.read() == WHOLE
        await back
        assert counts(running) == {"disturbed": 2, "continued": 2, "lost": 0}


async def test_a_site_that_freezes_while_it_takes_over_is_left_for_the_next() -> None:
    async with routed_sites("ams1", "iad1", "sin1", continue_within_s=0.6) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=2, ending=reset_it)
        fakes[1].behave = hang
        fakes[2].behave = continued_stream(COUNT)
        async with running.chat() as response:
            assert await response.read() == WHOLE
        assert fakes[1].cancelled == 1


async def test_a_frozen_site_is_left_in_mid_stream_once_its_probes_fail() -> None:
    async with routed_sites("ams1", "iad1", idle_timeout_s=60) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=3, ending=fall_silent)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            await response.content.readexactly(len(event(0)) * 3)
            fakes[0].status_body = b"frozen"
            assert event(0) + event(1) + event(2) + await response.read() == WHOLE
        assert running.counted("pilotlight_router_streams_disturbed_total", site="ams1", cause="frozen") == 1


async def test_a_stream_that_no_other_site_can_continue_waits_for_a_busy_site_that_misses_probes() -> None:
    async with sites("ams1") as fakes, router(fakes, idle_timeout_s=60) as running:

        async def pause(site: FakeSite, request: Any, response: Any) -> None:
            await site.go_on.wait()
            await response.write(b"".join(marked_event(i) for i in range(3, COUNT)))
            await response.write(with_resume_point(DONE, ResumePoint(0, (), "stop")))

        fakes[0].behave = continued_stream(COUNT, until=3, ending=pause)
        async with running.chat() as response:
            await response.content.readexactly(len(event(0)) * 3)
            fakes[0].status_body = b"busy"
            await running.until_states(ams1="unhealthy")
            enough_s = time.monotonic() + 3 * LOOK_AGAIN_S
            await running.until(lambda: time.monotonic() > enough_s)
            fakes[0].go_on.set()
            assert event(0) + event(1) + event(2) + await response.read() == WHOLE


async def test_a_stream_that_stands_still_leaves_its_site_though_the_probes_are_answered() -> None:
    async with routed_sites("ams1", "iad1", idle_timeout_s=60, stall_s=0.3) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=3, ending=fall_silent)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            assert await response.read() == WHOLE
        assert running.counted("pilotlight_router_streams_disturbed_total", site="ams1", cause="stalled") == 1
        await running.until(lambda: fakes[0].active == 0)


async def test_a_draining_site_keeps_its_stream_where_there_is_no_other_and_loses_it_when_there_is() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[1].status_fields = {"models": (model_status("another"),)}
        await running.until(lambda: running.edge.backends["iad1"].view().model("ember") is None)

        async def drain(site: FakeSite, request: Any, response: Any) -> None:
            await response.write(DRAIN_NOTICE + marked_event(3))
            await site.go_on.wait()
            await response.write(marked_event(4))
            await asyncio.Event().wait()

        fakes[0].behave = continued_stream(COUNT, until=3, ending=drain)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            await response.content.readexactly(len(event(0)) * 4)
            assert fakes[0].cancelled == 0
            fakes[1].status_fields = {}
            await asyncio.sleep(0.6)
            fakes[0].go_on.set()
            assert await response.read() == event(4) + event(5) + DONE
        assert running.counted("pilotlight_router_streams_disturbed_total", site="ams1", cause="draining") == 1


async def test_a_draining_site_ends_its_stream_itself_where_the_only_other_site_is_down() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, continue_within_s=0.5) as running:

        async def drain(site: FakeSite, request: Any, response: Any) -> None:
            await response.write(DRAIN_NOTICE + marked_event(3))
            await site.go_on.wait()
            await response.write(marked_event(4) + with_resume_point(event(5) + DONE, ResumePoint(0, (105,), "stop")))

        fakes[0].behave = continued_stream(COUNT, until=3, ending=drain)
        await fakes[1].stop()
        await running.until_states(iad1="unhealthy")
        async with running.chat() as response:
            await response.content.readexactly(len(event(0)) * 4)
            fakes[0].go_on.set()
            assert await response.read() == event(4) + event(5) + DONE


async def test_what_a_site_says_between_its_notice_and_its_first_event_is_not_lost() -> None:
    """The notice comes while the stream has only heartbeats, as a tool call's stream has before its first part."""
    async with routed_sites("ams1", "iad1") as (fakes, running):

        async def drain(site: FakeSite, request: Any, response: Any) -> None:
            await response.write(b": hb\n\n" + DRAIN_NOTICE)
            await asyncio.sleep(0.05)
            await response.write(marked_event(0))
            await asyncio.Event().wait()

        fakes[0].behave = continued_stream(COUNT, until=0, ending=drain)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            assert (await response.read()).replace(b": hb\n\n", b"") == WHOLE
        assert running.counted("pilotlight_router_streams_disturbed_total", site="ams1", cause="draining") == 1


async def test_a_stream_waits_a_while_for_a_site_to_come_back() -> None:
    async with sites("ams1") as fakes, router(fakes, continue_within_s=8.0) as running:
        fakes[0].behave = continued_stream(COUNT, until=3, ending=reset_it)
        async with running.chat() as response:
            await response.content.readexactly(len(event(0)) * 3)
            fakes[0].behave = continued_stream(COUNT)
            assert event(0) + event(1) + event(2) + await response.read() == WHOLE
        assert counts(running) == {"disturbed": 1, "continued": 1, "lost": 0}


async def refusing(running: Router, fakes: list[FakeSite]) -> dict[str, Any]:
    async with running.chat() as response:
        body = await response.read()
    assert body.startswith(b"".join(event(i) for i in range(3)))
    error = last_error(body)
    assert error["error"]["code"] == "upstream_lost"
    assert counts(running) == {"disturbed": 1, "continued": 0, "lost": 1}
    assert running.counted("pilotlight_router_requests_total", site="ams1", outcome="lost") == 1
    return error


@pytest.mark.parametrize(
    "other",
    [answer(503, {"error": {"message": "full", "code": "overloaded"}}), answer(400, {"error": "what?"}), stream_of(3)],
)
async def test_where_no_site_can_continue_the_client_gets_an_error_in_time(other: Any) -> None:
    async with routed_sites("ams1", "iad1", continue_within_s=0.3) as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=3, ending=reset_it)
        fakes[1].behave = other

        async def then_refuse() -> None:
            await fakes[0].asked.wait()
            fakes[0].behave = other

        refuses = asyncio.ensure_future(then_refuse())
        error = await refusing(running, fakes)
        assert "ams1 was lost before the end of its answer" in error["error"]["message"]
        assert "iad1: it answered" in error["error"]["message"]
        await refuses


async def test_a_stream_that_loses_every_site_it_comes_to_ends() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes, max_losses=2) as running:
        for fake in fakes:
            fake.behave = one_more_then_reset
        async with running.chat() as response:
            body = await response.read()
        assert body.startswith(event(0) + event(1) + event(2) + b"data: {")
        assert last_error(body)["error"]["code"] == "upstream_lost"
        assert counts(running) == {"disturbed": 3, "continued": 2, "lost": 1}


async def one_more_then_reset(site: FakeSite, request: Any) -> Any:
    _, length = decode_answer(request.headers[ANSWER])
    delivery = decode_delivery(site.bodies[-1][:length]).choices[0].token_ids if length else ()
    return await continued_stream(9, until=len(delivery) + 1, ending=reset_it)(site, request)


async def test_a_stream_without_marks_is_not_continued() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = raw_stream(event(0), event(1), event(2), end="reset")
        await refusing(running, fakes)
        assert fakes[1].bodies == []


async def test_a_client_that_leaves_between_two_sites_leaves_nothing_behind() -> None:
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = continued_stream(COUNT, until=3, ending=reset_it)
        fakes[1].behave = hang
        async with running.chat() as response:
            await fakes[1].asked.wait()
            response.close()
        await running.until(lambda: fakes[1].cancelled == 1)


async def test_a_clients_own_continuation_headers_and_marks_mean_nothing() -> None:
    forged = {ANSWER: "1.2.0123456789abcdef01234567.2", "x-pilotlight-marks": "1"}
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = continued_stream(COUNT)
        async with running.chat(headers=forged) as response:
            assert await response.read() == WHOLE
            assert "x-pilotlight-marks" not in response.headers
        (value,) = fakes[0].seen[0].headers.getall(ANSWER)
        assert value != forged[ANSWER]
        assert json.loads(fakes[0].bodies[0])["model"] == "ember"


async def test_every_try_is_signed_anew() -> None:
    """A signature is valid for a minute, but a stream may last longer."""
    now = time.time()
    async with routed_sites("ams1", "iad1") as (fakes, running):

        async def much_later(site: FakeSite, request: Any, response: Any) -> None:
            running.edge.clocks.record("iad1", now + 3600)
            await reset_it(site, request, response)

        fakes[0].behave = continued_stream(COUNT, until=3, ending=much_later)
        fakes[1].behave = continued_stream(COUNT)
        async with running.chat() as response:
            assert await response.read() == WHOLE
        second = fakes[1].seen[0]
        request_id = second.headers["x-request-id"]
        assert hop_is_genuine(second.headers[HOP], SECRET, now + 3600, Hop("POST", second.path, request_id, "iad1"))


async def test_sixty_four_streams_lose_a_site_at_once_and_none_loses_a_token() -> None:
    """Probes are off, because on a busy machine they would fail before all streams have started."""
    policy = FirstThen("ams1", "iad1")
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=policy, probe_interval_s=60.0) as running:
        fakes[0].behave = continued_stream(40, until=11, ending=fall_silent)
        fakes[1].behave = continued_stream(40)

        num_under_way = 0

        async def read() -> bytes:
            nonlocal num_under_way
            async with running.chat() as response:
                begun = await response.content.readexactly(len(b"".join(map(event, range(11)))))
                num_under_way += 1
                return begun + await response.read()

        reading = [asyncio.ensure_future(read()) for _ in range(64)]
        await running.until(lambda: num_under_way == 64)
        await fakes[0].stop()
        whole = b"".join(event(i) for i in range(40)) + DONE
        assert await asyncio.gather(*reading) == [whole] * 64
        assert counts(running) == {"disturbed": 64, "continued": 64, "lost": 0}
