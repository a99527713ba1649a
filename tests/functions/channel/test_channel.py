"""A channel over a real socket pair: values, streams, credit, cancellation, and a hostile peer."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import FRAMES_AT_ONCE, Channel
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.failure import ChannelClosed, Failure
from pilotlight.functions.channel.frames import (
    BindingCall,
    Fail,
    FrameDecoder,
    FrameError,
    Ping,
    Reply,
    StreamChunk,
    plain,
)
from pilotlight.functions.channel.streams import WINDOW_BYTES, Inbound
from tests.asgi import eventually
from tests.functions.channel.whole import whole


class Other:
    """A binding at the runtime's side."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.sent_pieces = 0

    async def __call__(self, frame: frames.Request, body: Inbound | None) -> Any:
        assert isinstance(frame, BindingCall)
        return await getattr(self, frame.method)(*frame.args, body=body, **frame.kwargs)

    async def add(self, a: int, b: int, body: None = None) -> int:
        return a + b

    async def count(self, body: Inbound) -> int:
        return sum([len(chunk) async for chunk in body])

    async def echo(self, body: Inbound) -> StreamingReply:
        return StreamingReply({"type": "echo"}, body)

    async def hang(self, body: None = None) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()

    async def endless(self, body: None = None) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    self.sent_pieces += 1
                    yield b"x" * 1000
            finally:
                self.cancelled.set()

        return pieces()

    async def wrong(self, body: None = None) -> object:
        return {"thing": [object()]}


@asynccontextmanager
async def pair(other: Any, **options: Any) -> AsyncIterator[tuple[Channel, Channel]]:
    async def nothing(frame: frames.Request, body: Inbound | None) -> None:
        return None

    left, right = socket.socketpair()
    isolate = await Channel.open(left, nothing, is_runtime=False)
    runtime = await Channel.open(right, other, is_runtime=True, **options)
    try:
        yield isolate, runtime
    finally:
        isolate.close()
        runtime.close()
        await isolate.closed.wait()
        await runtime.closed.wait()


async def pieces(number: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(number):
        yield b"y" * size


async def test_a_call_brings_its_value_back() -> None:
    async with pair(Other()) as (isolate, runtime):
        assert await isolate.call("X", "add", 2, b=3) == 5
        assert await asyncio.gather(*(isolate.call("X", "add", i, i) for i in range(200))) == [
            2 * i for i in range(200)
        ]
        assert isolate.num_open == runtime.num_open == 0


async def test_a_body_larger_than_the_window_arrives_whole_and_comes_back() -> None:
    async with pair(Other()) as (isolate, _):
        result = await isolate.begin("X", "count", body=pieces(50, 100_000))
        assert result.value == 5_000_000
        echoed = await isolate.begin("X", "echo", body=pieces(30, 70_001))
        assert echoed.value == {"type": "echo"}
        assert echoed.body is not None
        assert len(await whole(echoed.body)) == 30 * 70_001


async def test_a_reply_on_its_way_while_its_beginner_leaves_is_no_fault_of_the_other_side() -> None:
    for streamed in (False, True):
        async with pair(Other()) as (isolate, _):
            asked = asyncio.ensure_future(isolate.begin("X", "hang"))
            await eventually(lambda: isolate.num_open == 1)
            asked.cancel()  # the task is cancelled in the loop's next iteration; the frames below arrive in the current one
            for frame in (Reply(1, None, streamed), StreamChunk(1, b"piece"), frames.StreamEnd(1))[
                : 3 if streamed else 1
            ]:
                isolate.data_received(frames.encode(frame, 1 << 20))
            assert (await asyncio.wait({asked}))[0] == {asked}
            assert asked.cancelled()
            assert not isolate.closed.is_set(), isolate.why_closed
            assert await isolate.call("X", "add", 1, 2) == 3


async def test_what_is_left_before_its_first_step_counts_as_open_no_longer() -> None:
    async with pair(Other(), max_open=8) as (isolate, runtime):
        for _ in range(20):
            asked = asyncio.ensure_future(isolate.begin("X", "hang"))
            await asyncio.sleep(0)
            asked.cancel()  # both messages arrive in one read
            await asyncio.wait({asked})
            await eventually(lambda: runtime.num_open == 0)
        assert await isolate.call("X", "add", 1, 2) == 3


async def test_a_value_that_cannot_be_sent_is_named_with_its_place() -> None:
    async with pair(Other()) as (isolate, _):
        with pytest.raises(Failure, match=r"the value\['thing'\]\[0\] is of type object"):
            await isolate.call("X", "wrong")
        with pytest.raises(TypeError, match=r"arguments\[0\] is of type complex"):
            await isolate.call("X", "add", 1j, 2)
        with pytest.raises(ValueError, match="64 bits"):
            await isolate.call("X", "add", 1 << 70, 2)


async def test_calls_under_way_fail_when_the_other_process_dies() -> None:
    async with pair(Other()) as (isolate, runtime):
        call = asyncio.ensure_future(isolate.call("X", "hang"))
        await eventually(lambda: runtime.num_open == 1)
        runtime.close()
        with pytest.raises(ChannelClosed):
            await call
        with pytest.raises(ChannelClosed):
            await isolate.call("X", "add", 1, 1)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        frames.encode(BindingCall(1, "X", "hang"), 100) + frames.encode(Reply(1, 1), 100),
        (5).to_bytes(4, "big") + msgspec.msgpack.encode([1, 2, 3, 4]),
        frames.encode(BindingCall(2, "X", "add"), 100),  # an id with the other side's parity
        frames.encode(BindingCall(1, "X", "hang"), 100) + frames.encode(BindingCall(1, "X", "hang"), 100),
        frames.encode(BindingCall(1, "X", "endless"), 100) + frames.encode(frames.More(1, 1 << 40), 100),
        frames.encode(BindingCall(1, "X", "hang", streamed=True), 100)
        + frames.encode(StreamChunk(1, b"x" * 200_000), 1 << 20) * 3,
        b"\x00\x10\x00\x00" + b"\x91" * (1 << 20),
    ],
)
async def test_a_side_that_breaks_the_protocol_is_cut_off(hostile: bytes) -> None:
    left, right = socket.socketpair()
    runtime = await Channel.open(right, Other(), is_runtime=True)
    left.setblocking(False)
    with suppress(BrokenPipeError):
        await asyncio.get_running_loop().sock_sendall(left, hostile)
    await asyncio.wait_for(runtime.closed.wait(), 60)
    assert "broke the protocol" in runtime.why_closed
    left.close()


async def test_a_side_that_is_refused_without_end_and_reads_nothing_of_it_is_cut_off() -> None:
    """Otherwise the refusals would be queued in this process's memory without limit."""
    left, right = socket.socketpair()
    runtime = await Channel.open(right, Other(), is_runtime=True, max_open=1)
    left.setblocking(False)
    calls = b"".join(frames.encode(BindingCall(i, "X", "hang"), 100) for i in range(1, 40_001, 2))
    with suppress(BrokenPipeError, ConnectionResetError):
        async with asyncio.timeout(60):
            await asyncio.get_running_loop().sock_sendall(left, calls)
    await asyncio.wait_for(runtime.closed.wait(), 60)
    assert "does not read their refusals" in runtime.why_closed
    left.close()


async def test_failures_wait_until_there_is_room_for_them() -> None:
    left, right = socket.socketpair()
    runtime = await Channel.open(right, Other(), is_runtime=True, max_open=20_000)
    left.setblocking(False)
    for first in range(1, 20_001, 100):
        calls = [frames.encode(BindingCall(i, "X", "no such method"), 100) for i in range(first, first + 100, 2)]
        await asyncio.get_running_loop().sock_sendall(left, b"".join(calls))
        await asyncio.sleep(0)
    await eventually(lambda: runtime.num_open > 1000)
    assert runtime._transport is not None
    assert runtime._transport.get_write_buffer_size() < 2 * WINDOW_BYTES
    runtime.close()
    left.close()


FRAMES: list[frames.AnyFrame] = [
    BindingCall(1, "KV", "get", ["key"], {"type": "json"}), Reply(2, {"a": [None, True, 1.5, b"\x00"]}), StreamChunk(4, b"z" * 3000),
    Fail(3, 3040, 429, "out of capacity"), Ping(6), frames.FetchEvent(8, "GET", "http://x/", [("a", "b")], b"body"),
]  # fmt: skip


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    data = b"".join(frames.encode(frame, 1 << 20) for frame in FRAMES)
    decoder, out, position = FrameDecoder(1 << 20), [], 0
    for size in [*cuts, len(data)]:
        out += list(decoder.feed(data[position : position + size]))
        position += size
    assert out == FRAMES


def test_a_frame_too_large_is_refused_before_it_is_held() -> None:
    decoder = FrameDecoder(100)
    with pytest.raises(FrameError, match="1000 bytes"):
        list(decoder.feed((1000).to_bytes(4, "big")))
    with pytest.raises(ValueError, match="send less, or send a stream"):
        frames.encode(StreamChunk(1, b"x" * 101), 100)


def test_subclasses_of_plain_types_cross_as_those() -> None:
    """Libraries use such subclasses: safe strings of templates, numpy's float64, members of enums."""

    class Text(str):
        def __str__(self) -> str:
            return "another"

    class Real(float):
        pass

    class Data(bytes):
        pass

    values = [
        Text("a"),
        Real(1.5),
        Data(b"b"),
        HTTPStatus.OK,
        True,
        None,
        {Text("k"): Text("v")},
        (bytearray(b"c"), memoryview(b"d")),
    ]
    frame = BindingCall(1, "b", "m", plain(values))
    (decoded,) = FrameDecoder(1000).feed(frames.encode(frame, 1000))
    assert isinstance(decoded, BindingCall)
    assert decoded.args == ["a", 1.5, b"b", 200, True, None, {"k": "v"}, [b"c", b"d"]]


def test_what_no_channel_carries_is_refused_with_its_place() -> None:
    for value, why in (
        ({"a": [1, {2: 3}]}, r"the value\['a'\]\[1\] has the key 2, which is not a string"),
        ({"a": object()}, r"the value\['a'\] is of type object"),
        ([1j], r"the value\[0\] is of type complex"),
    ):
        with pytest.raises(TypeError, match=why):
            plain(value)


async def test_many_frames_that_come_at_once_give_others_their_turns() -> None:
    """One read of a transport may bring 2 MB; that many small frames take a quarter of a second to handle."""

    class Transport(asyncio.Transport):
        told: tuple[str, ...] = ()

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def is_closing(self) -> bool:
            return False

        def pause_reading(self) -> None:
            self.told += ("pause",)

        def resume_reading(self) -> None:
            self.told += ("resume",)

    channel, transport = Channel(Other(), is_runtime=True), Transport()
    channel.connection_made(transport)
    nothing = frames.encode(frames.Cancel(3), 1000)
    channel.data_received(nothing * FRAMES_AT_ONCE)
    assert transport.told == ()
    channel.data_received(nothing * (FRAMES_AT_ONCE + 1))
    assert transport.told == ("pause",)
    await asyncio.sleep(0)
    assert transport.told == ("pause", "resume")
