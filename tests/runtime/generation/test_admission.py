"""Permits: limits hold, and permits are given back."""

import asyncio

import pytest

from pilotlight.runtime.generation.admission import QUEUED_CACHES, Admission
from pilotlight.wire.errors import ApiError
from tests.asgi import call, eventually, start
from tests.runtime.conftest import SiteMaker

CHAT = "/ai/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def test_one_more_than_max_inflight_is_refused() -> None:
    admission = Admission(max_inflight=2)
    with admission.permit(), admission.permit():
        with pytest.raises(ApiError) as refusal, admission.permit():
            pass
        assert (refusal.value.word, refusal.value.retry_after_s) == ("overloaded", 2.0)
        assert admission.inflight == 2
    assert admission.inflight == 0


def test_reserved_tokens_have_a_limit_and_come_back() -> None:
    admission = Admission(max_inflight=100)
    with admission.permit() as first:
        # there is no other request, so the engine decides whether this one fits
        first.reserve("m", 100_010, 1000)
        with pytest.raises(ApiError, match=f"{QUEUED_CACHES} times its KV cache"), admission.permit() as second:
            second.reserve("m", 20, 1000)
        with admission.permit() as other:
            other.reserve("other", 20, 1000)
            assert admission.reserved == {"m": 100_010, "other": 20}
    assert admission.inflight == 0
    assert set(admission.reserved.values()) == {0}


def test_while_it_drains_nothing_new_is_admitted_and_clients_are_sent_away_for_longer() -> None:
    admission = Admission(max_inflight=1)
    with admission.permit():
        admission.drain()
        with pytest.raises(ApiError) as refusal, admission.permit():
            pass
    assert (refusal.value.word, refusal.value.retry_after_s) == ("draining", 5.0)
    assert admission.inflight == 0


async def test_a_drain_waits_for_requests_and_for_sockets_which_take_no_places() -> None:
    admission = Admission(max_inflight=1)
    await admission.wait_until_empty()
    for first, second in (
        (admission.permit(), admission.attachment()),
        (admission.attachment(), admission.permit()),
        (admission.attachment(), admission.attachment()),
    ):
        with first:
            waiting = asyncio.ensure_future(admission.wait_until_empty())
            with second:
                assert admission.num_open == 2
                await asyncio.sleep(0)
                assert not waiting.done()
            await asyncio.sleep(0)
            assert (waiting.done(), admission.num_open) == (False, 1)
        await asyncio.wait_for(waiting, 60)
    assert (admission.num_open, admission.inflight, admission.attached) == (0, 0, 0)


async def test_a_full_site_refuses_in_either_dialect(make_site: SiteMaker) -> None:
    async with make_site(limits={"max_inflight": 1}) as site:
        site.engine.script = [30]
        holder = start(site.app, CHAT, HELLO)
        await eventually(lambda: site.engine.open)
        refused = await call(site.app, CHAT, HELLO)
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "2"
        cloud = await call(site.app, "/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi"})
        assert (cloud.status, cloud.json["errors"][0]["code"]) == (429, 3040)
        holder.disconnect()
        await holder.done()
        site.engine.script = []
        await site.is_idle()
