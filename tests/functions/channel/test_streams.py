"""Both ends of one stream without a socket: bytes in transit, credit, and the state after the end."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest

from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.failure import ChannelClosed, Failure, as_failure
from pilotlight.functions.channel.frames import AnyFrame, Fail, FrameError, More, StreamChunk, StreamEnd
from pilotlight.functions.channel.streams import CHUNK_BYTES, WINDOW_BYTES, Credit, Inbound, feed
from tests.functions.channel.whole import whole


class Written:
    """A channel that records written frames."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.frames: list[AnyFrame] = []
        self.room = asyncio.Event()
        self.room.set()
        self._is_closed = is_closed

    def write(self, frame: AnyFrame) -> None:
        if self._is_closed:
            raise ChannelClosed
        self.frames.append(frame)

    def describe(self, error: BaseException) -> Failure:
        return as_failure(error)

    @property
    def channel(self) -> Channel:
        return cast(Channel, self)


def inbound(written: Written) -> tuple[Inbound, list[str]]:
    left: list[str] = []
    return Inbound(written.channel, 7, lambda: left.append("left")), left


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_window_may_wait_for_its_reader_and_not_a_byte_more() -> None:
    stream, _ = inbound(Written())
    stream.push(bytes(WINDOW_BYTES))
    with pytest.raises(FrameError, match="exceeded its credit"):
        stream.push(b"x")


async def test_an_empty_piece_breaks_the_protocol() -> None:
    stream, _ = inbound(Written())
    with pytest.raises(FrameError, match="empty"):
        stream.push(b"")


async def test_small_pieces_that_wait_are_joined_so_that_a_window_is_few_of_them() -> None:
    stream, _ = inbound(Written())
    sent = bytes(range(256)) * (WINDOW_BYTES // 256)
    for n in range(WINDOW_BYTES):
        stream.push(sent[n : n + 1])
    stream.end()
    pieces = [piece async for piece in stream]
    assert b"".join(pieces) == sent
    assert len(pieces) <= 128


async def test_credit_is_given_for_taken_bytes_half_a_window_at_a_time_and_none_after_the_end() -> None:
    written = Written()
    stream, _ = inbound(written)
    half = WINDOW_BYTES // 2
    for size in (half - 1, 1, half):
        stream.push(bytes(size))
    assert len(await anext(stream)) == half - 1
    assert written.frames == []
    await anext(stream)
    assert written.frames == [More(7, half)]
    stream.push(bytes(half))  # there is credit again
    with pytest.raises(FrameError):
        stream.push(b"x")
    await anext(stream)
    await anext(stream)
    assert written.frames == [More(7, half)] * 3
    stream.push(bytes(half))
    stream.end()
    assert len(await anext(stream)) == half
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert len(written.frames) == 3


async def test_what_had_come_is_read_before_the_error_that_has_ended_the_stream_and_the_first_end_counts() -> None:
    stream, left = inbound(Written())
    stream.push(b"first")
    stream.end(Failure("the disk is gone"))
    stream.end()
    stream.push(b"late")
    assert await anext(stream) == b"first"
    for _ in range(2):
        with pytest.raises(Failure, match="the disk is gone"):
            await anext(stream)
    stream.cancel()
    assert left == [], "the sender has finished already"


async def test_a_reader_that_waits_is_woken_by_a_piece_by_the_end_and_by_leaving() -> None:
    for wake in (lambda stream: stream.push(b"a"), Inbound.end, Inbound.cancel):
        stream, left = inbound(Written())
        reading = asyncio.ensure_future(whole(stream))
        await settle()
        assert not reading.done()
        wake(stream)
        await settle()
        stream.end()
        (outcome,) = await asyncio.gather(reading, return_exceptions=True)
        if wake is Inbound.cancel:
            assert isinstance(outcome, Failure)
            assert (outcome.code, left) == ("cancelled", ["left"])
        else:
            assert (outcome, left) == (b"" if wake is Inbound.end else b"a", [])


async def test_a_reader_that_leaves_is_reported_once_and_later_pieces_are_dropped() -> None:
    stream, left = inbound(Written())
    stream.push(b"unread")
    await stream.aclose()
    stream.cancel()
    stream.push(bytes(2 * WINDOW_BYTES))
    assert left == ["left"]
    with pytest.raises(Failure, match="cancelled by its reader"):
        await anext(stream)


async def test_who_sends_waits_until_there_is_credit_for_the_whole_piece() -> None:
    credit = Credit()
    await credit.take(WINDOW_BYTES - 5)
    await credit.take(5)
    taking = asyncio.ensure_future(credit.take(10))
    credit.give(9)
    await settle()
    assert not taking.done()
    credit.give(1)
    await settle()
    assert taking.done()
    credit.give(WINDOW_BYTES)
    for wrong in (1, -1):
        with pytest.raises(FrameError, match="credit for more"):
            credit.give(wrong)


async def stream_of(pieces: Iterable[bytes | Exception], closed: list[bool]) -> AsyncIterator[bytes]:
    try:
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece
    finally:
        closed.append(True)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_stream_is_sent_in_small_pieces_that_join_to_what_it_was_and_then_ends(size: int) -> None:
    written, closed, data = Written(), list[bool](), bytes(i % 251 for i in range(size))
    await feed(written.channel, 7, stream_of([data, b"tail"], closed), Credit())
    *chunks, end = written.frames
    assert (end, closed) == (StreamEnd(7), [True])
    sent = [chunk.data for chunk in chunks if isinstance(chunk, StreamChunk) and chunk.id == 7]
    assert len(sent) == len(chunks)
    assert b"".join(sent) == data + b"tail"
    assert max(map(len, sent)) <= CHUNK_BYTES


async def test_a_broken_stream_reports_it_after_its_bytes_and_one_without_its_channel_reports_nothing() -> None:
    written, closed = Written(), list[bool]()
    await feed(written.channel, 7, stream_of([b"a", KeyError("nothing there")], closed), Credit())
    chunk, fail = written.frames
    assert chunk == StreamChunk(7, b"a")
    assert isinstance(fail, Fail)
    assert (fail.id, fail.status, fail.name, "nothing there" in fail.message) == (7, 500, "KeyError", True)
    await feed(Written(is_closed=True).channel, 7, stream_of([b"a"], closed), Credit())
    assert closed == [True, True]


async def test_a_stream_waits_for_the_sockets_room_and_for_credit() -> None:
    written, closed = Written(), list[bool]()
    written.room.clear()
    credit = Credit()
    feeding = asyncio.ensure_future(feed(written.channel, 7, stream_of([bytes(WINDOW_BYTES), b"x"], closed), credit))
    await settle()
    assert written.frames == []
    written.room.set()
    await settle()
    assert sum(len(chunk.data) for chunk in written.frames if isinstance(chunk, StreamChunk)) == WINDOW_BYTES
    assert not feeding.done()
    credit.give(1)
    await settle()
    assert written.frames[-2:] == [StreamChunk(7, b"x"), StreamEnd(7)]
    assert feeding.done()


async def test_a_stream_without_an_end_of_its_own_is_sent_too() -> None:
    class Once:
        left = 1

        def __aiter__(self) -> "Once":
            return self

        async def __anext__(self) -> bytes:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return b"a"

    written = Written()
    await feed(written.channel, 7, cast(Any, Once()), Credit())
    assert written.frames == [StreamChunk(7, b"a"), StreamEnd(7)]
