"""The events of a stream that can be read again: numbers, size, and readers before, during and after it."""

import asyncio

import pytest

from pilotlight.edge_router.durable.event_buffer import EVENT_BYTES, EventBuffer
from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import HEARTBEAT, EventDecoder, encode_event


def filled(*data: bytes, heartbeat_s: float = 60.0) -> EventBuffer:
    buffer = EventBuffer(heartbeat_s)
    for event in EventDecoder().feed(b"".join(map(encode_event, data))):
        buffer.add(event)
    return buffer


async def rest(buffer: EventBuffer, place: int) -> list[bytes]:
    return [batch async for batch in buffer.read(place)]


async def test_events_are_numbered_from_one_and_read_from_any_place() -> None:
    buffer = filled(b"a", b"b", b"c")
    buffer.add(EventDecoder().feed(encode_event(b"", name="end"))[0])
    whole = [encode_event(data, number) for number, data in enumerate((b"a", b"b", b"c"), 1)] + [
        encode_event(b"", 4, "end")
    ]
    assert buffer.num_bytes == sum(map(len, whole)) + 4 * EVENT_BYTES
    assert buffer.last is not None
    assert (buffer.last.event_id, buffer.last.name) == (b"4", b"end")
    buffer.add_last(b"data: last\n\n")
    buffer.end(3.0)
    assert buffer.num_bytes == sum(map(len, whole)) + len(b"data: last\n\n") + 5 * EVENT_BYTES
    for place in range(6):
        expected = b"".join([*whole, b"data: last\n\n"][place:])
        assert await rest(buffer, place) == ([expected] if expected else [])
    assert EventBuffer().last is None


def test_a_place_is_one_that_the_stream_has_had() -> None:
    buffer = filled(b"a", b"b")
    assert [buffer.place_after(name) for name in ("", "0", "1", "2", "002")] == [0, 0, 1, 2, 2]
    for name in ("3", "-1", "x", "1.", "٢", "0" * 10):
        with pytest.raises(ApiError, match="this stream has no event") as refused:
            buffer.place_after(name)
        assert refused.value.word == "invalid_request"


async def test_readers_get_all_events_at_once() -> None:
    buffer = filled(b"a")
    readers = [buffer.read(0), buffer.read(1)]
    assert await anext(readers[0]) == encode_event(b"a", 1)
    waiting = [asyncio.ensure_future(anext(reader)) for reader in readers]
    await asyncio.sleep(0)
    for data in (b"b", b"c"):
        buffer.add(EventDecoder().feed(encode_event(data))[0])
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting), "readers are notified after a whole batch"
    buffer.notify()
    assert await asyncio.gather(*waiting) == [encode_event(b"b", 2) + encode_event(b"c", 3)] * 2


async def test_a_reader_gets_a_comment_while_there_are_no_events() -> None:
    buffer = filled(b"a", heartbeat_s=0.001)
    reader = buffer.read(1)
    assert await anext(reader) == HEARTBEAT
    waiting = asyncio.ensure_future(anext(reader, b""))
    buffer.end(1.0)
    assert await waiting in (b"", HEARTBEAT)
    assert await rest(buffer, 1) == []
