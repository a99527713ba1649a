"""The stream of a response within its function's limits: how it ends, and that its end is reported once."""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import ChannelClosed, Failure
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.response_stream import BURST_S, ResponseStream, StreamThrottle
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.support.time_limits import TimeLimit
from tests.clock import Clock

MIB = 1 << 20


class Body:
    """An isolate's response body; a chunk of None makes it wait forever."""

    def __init__(self, *pieces: bytes | BaseException | None) -> None:
        self.pieces = deque(pieces)
        self.num_cancelled = 0

    async def __anext__(self) -> bytes:
        if not self.pieces:
            raise StopAsyncIteration
        piece = self.pieces.popleft()
        if piece is None:
            await asyncio.Event().wait()
        if isinstance(piece, BaseException):
            raise piece
        return piece or b""

    def cancel(self) -> None:
        self.num_cancelled += 1


class Isolate:
    def __init__(self) -> None:
        self.limits = replace(FunctionLimits(), response_mib=2.0)
        self.sent: list[int] = []
        self.told: list[Fault] = []

    async def sent_chunk(self, size: int) -> None:
        self.sent.append(size)

    def stream_failed(self, fault: Fault) -> None:
        self.told.append(fault)

    async def exit_fault(self) -> Fault:
        return Fault("it was killed", code="crashed")


class Answer:
    def __init__(self, *pieces: bytes | BaseException | None, within_s: float | None = 60.0) -> None:
        self.isolate, self.body, self.num_ended = Isolate(), Body(*pieces), 0
        limit = None if within_s is None else TimeLimit(within_s)
        self.stream = ResponseStream(cast(Any, self.isolate), cast(Any, self.body), limit, self._end)

    def _end(self, stream: ResponseStream) -> None:
        assert stream is self.stream
        self.num_ended += 1

    async def read(self) -> int:
        return sum([len(piece) async for piece in self.stream])

    async def fault(self) -> Fault:
        with pytest.raises(Fault) as raised:
            await self.read()
        assert (self.num_ended, self.body.num_cancelled, self.isolate.told) == (1, 1, [raised.value])
        assert await self.read() == 0, "the stream has ended"
        await self.stream.aclose()
        assert (self.num_ended, self.body.num_cancelled) == (1, 1)
        return raised.value


async def test_a_stream_that_ends_by_itself_is_over_once_and_its_pieces_were_counted() -> None:
    answer = Answer(bytes(MIB), bytes(MIB))
    assert await answer.read() == 2 * MIB
    assert (answer.num_ended, answer.isolate.sent, answer.isolate.told) == (1, [MIB, MIB], [])
    assert await answer.read() == 0
    assert answer.num_ended == 1


async def test_a_byte_beyond_its_size_ends_it_unless_it_is_a_sockets() -> None:
    assert (await Answer(bytes(2 * MIB), b"x").fault()).code == "response_too_large"
    socket = Answer(bytes(2 * MIB), b"x", within_s=None)
    assert await socket.read() == 2 * MIB + 1


async def test_a_stream_that_takes_too_long_or_breaks_ends_with_the_reason() -> None:
    assert (await Answer(b"a", None, within_s=0.01).fault()).code == "wall_time"
    assert (await Answer(b"a", ChannelClosed()).fault()).message == "it was killed"
    fault = await Answer(Failure("a\x1b", code="c", status=418)).fault()
    assert (fault.message, fault.code, fault.status) == ("a\\x1b", "c", 500)


async def test_a_reader_that_leaves_ends_it_without_blame_though_nothing_was_read() -> None:
    answer = Answer(None)
    await answer.stream.aclose()
    await answer.stream.aclose()
    assert (answer.num_ended, answer.body.num_cancelled, answer.isolate.told) == (1, 1, [])
    answer = Answer(None)
    reading = asyncio.ensure_future(answer.read())
    for _ in range(5):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert (reading.cancelled(), answer.num_ended, answer.isolate.told) == (True, 1, [])


async def test_streams_share_a_rate_and_a_pause_saves_up_no_more_than_a_burst() -> None:
    clock, slept = Clock(1000.0), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    throttle = StreamThrottle(1024.0, clock, sleep)
    await throttle.take(1024 * BURST_S * 0.99)
    assert slept == [], "a short burst is not delayed"
    await throttle.take(1024 * BURST_S)
    assert slept == [pytest.approx(1.49 * BURST_S)]
    clock.now += 60.0
    await throttle.take(1024 * BURST_S * 0.99)
    await throttle.take(1024 * 0.5)
    assert slept[1:] == [pytest.approx(0.5 + 0.49 * BURST_S)]
