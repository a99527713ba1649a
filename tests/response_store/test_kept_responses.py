"""Readers of a kept response get each event and the end, however the response ends."""

import asyncio
import json

import pytest

from pilotlight.response_store.kept_responses import LOST, KeptResponse, PreviousResponse, joined
from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import parse_event


def made() -> KeptResponse:
    return KeptResponse("t", {"id": "resp_1", "status": "in_progress", "output": []})


def add(response: KeptResponse, event: bytes) -> None:
    response.untold.append(event)
    response.publish(1)


async def test_a_reader_gets_each_event_and_the_end() -> None:
    response = made()
    add(response, b"a")
    assert await response.after(0) == ([b"a"], False)
    response.end_as("failed", ApiError("engine_error", "it broke"))
    events, is_last = await response.after(1)
    (last,) = (parse_event(raw) for raw in events)
    told = json.loads(last.data or b"")
    assert is_last
    assert last.name == b"response.failed"
    assert told["type"] == "response.failed"
    assert told["sequence_number"] == 1
    assert told["response"] == response.fields
    assert response.fields["error"] == {"code": "engine_error", "message": "it broke"}
    assert await response.after(2) == ([], True)
    response.end_as("cancelled")
    assert (response.fields["status"], len(response.events)) == ("failed", 2), "a response ends only once"


async def test_a_reader_that_waits_is_woken_by_the_next_event_and_by_the_end() -> None:
    response = made()
    for happen, told in (
        (lambda: add(response, b"a"), ([b"a"], False)),
        (lambda: response.end_as("completed"), ([], True)),
    ):
        reading = asyncio.create_task(response.after(len(response.events)))
        await asyncio.sleep(0)
        assert not reading.done()
        happen()
        async with asyncio.timeout(60):
            assert await reading == told
    assert (response.fields["status"], response.fields["error"]) == ("completed", None)


async def test_a_reader_gets_only_what_is_stored_and_an_error_when_another_process_goes_on() -> None:
    response = made()
    response.untold += [b":pl [0,[7]]\ndata: 1\n\n", b"data: 2\n\n"]
    response.publish(1)
    assert await response.after(0) == ([b"data: 1\n\n"], False)
    reading = asyncio.create_task(response.after(1))
    await asyncio.sleep(0)
    response.leave()
    response.end_as("failed", LOST)
    with pytest.raises(ApiError) as refused:
        await reading
    assert (refused.value.word, response.is_ended) == ("draining", False)
    assert response.all_events == [b"data: 1\n\n", b"data: 2\n\n"]


def test_an_input_consists_of_earlier_items_and_the_new_ones() -> None:
    assert joined(b"", b"1", b"", b"2") == b"1,2"
    assert KeptResponse("t", {}, b"3").input == b"3"
    assert KeptResponse("t", {}, b"3", PreviousResponse(7, "resp_0", b"1,2")).input == b"1,2,3"
    assert KeptResponse("t", {"output": [{"a": 1}, {"b": 2}]}).output == b'{"a":1},{"b":2}'
    assert KeptResponse("t", {"output": []}).output == b""
    assert LOST.word == "aborted"
