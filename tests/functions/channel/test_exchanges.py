"""The permitted frames of an exchange, and its state after the end: one side is a channel, the other the test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.failure import ChannelClosed, Failure, as_failure, fail_frame
from pilotlight.functions.channel.frames import (
    AnyFrame,
    BindingCall,
    Cancel,
    Fail,
    FrameDecoder,
    More,
    Note,
    Ping,
    Pong,
    Reply,
    StreamChunk,
    StreamEnd,
)
from pilotlight.functions.channel.streams import WINDOW_BYTES, Inbound
from tests.asgi import eventually
from tests.functions.channel.whole import whole

MOST = 1 << 22


class Peer:
    """The other side of a channel: it sends any frames, and records received ones."""

    def __init__(self, channel: Channel, sock: socket.socket) -> None:
        self.channel = channel
        self.heard: list[AnyFrame] = []
        self._socket = sock
        self._decoder = FrameDecoder(MOST)

    def say(self, *said: AnyFrame) -> None:
        """Send frames as if all had arrived in one read."""
        self.channel.data_received(b"".join(frames.encode(frame, MOST) for frame in said))

    async def hear(self, number: int) -> list[AnyFrame]:
        """Wait until `number` frames have been received in all, and return them."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while len(self.heard) < number:
                self.heard += self._decoder.feed(await loop.sock_recv(self._socket, 1 << 20))
        return self.heard


@asynccontextmanager
async def met(answer: Callable[..., Any], *, is_runtime: bool = False, **options: Any) -> AsyncIterator[Peer]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    channel = await Channel.open(ours, answer, is_runtime=is_runtime, **options)
    try:
        yield Peer(channel, theirs)
    finally:
        channel.close()
        await channel.closed.wait()
        theirs.close()


async def nothing(frame: frames.Request, body: Inbound | None) -> None:
    raise AssertionError("nobody has asked")


async def endless(closed: list[bool]) -> AsyncIterator[bytes]:
    try:
        while True:
            yield bytes(1000)
    finally:
        closed.append(True)


@pytest.mark.parametrize(
    "said",
    [
        (Reply(1, 1, streamed=True), Reply(1, 2)),
        (StreamChunk(1, b"unannounced"),),
        (StreamEnd(1),),
        (Reply(1, 1, streamed=True), StreamChunk(1, bytes(WINDOW_BYTES)), StreamChunk(1, b"x")),
        (More(1, 1),),
        (BindingCall(1, "X", "m"),),
    ],
)
async def test_an_answer_that_breaks_the_protocol_ends_the_channel_and_who_asked_hears_of_it(
    said: tuple[AnyFrame, ...],
) -> None:
    async with met(nothing) as peer:
        asking = asyncio.ensure_future(peer.channel.begin("X", "m"))
        await peer.hear(1)
        peer.say(*said)
        await asyncio.wait_for(peer.channel.closed.wait(), 60)
        assert "broke the protocol" in peer.channel.why_closed
        outcome = (await asyncio.gather(asking, return_exceptions=True))[0]
        if not isinstance(outcome, ChannelClosed):
            with pytest.raises(ChannelClosed):
                await whole(outcome.body)
        assert peer.channel.num_open == 0


@pytest.mark.parametrize("said", [Reply(2, 1), StreamChunk(2, b"x"), StreamEnd(2), Fail(2, "c", 500, "m")])
async def test_what_only_who_answers_may_say_ends_the_channel(said: AnyFrame) -> None:
    asked = asyncio.Event()

    async def hang(frame: frames.Request, body: Inbound | None) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with met(hang) as peer:
        peer.say(BindingCall(2, "X", "m"))  # without a body
        await asked.wait()
        peer.say(said)
        await asyncio.wait_for(peer.channel.closed.wait(), 60)
        assert "broke the protocol" in peer.channel.why_closed


async def test_an_answer_that_is_over_is_forgotten_and_later_reports_change_nothing() -> None:
    async with met(nothing) as peer:
        for id, said in (
            (1, (Reply(1, "a"),)),
            (3, (Reply(3, "a", streamed=True), StreamChunk(3, b"b"), StreamEnd(3))),
        ):
            asking = asyncio.ensure_future(peer.channel.begin("X", "m"))
            await peer.hear(len(peer.heard) + 1)
            peer.say(*said)
            result = await asking
            assert (result.value, peer.channel.num_open) == ("a", 0)
            peer.say(Reply(id, "late"), StreamChunk(id, b"late"), More(id, 1), Cancel(id))
            assert (result.body is None) == (id == 1)
            if result.body is not None:
                assert await whole(result.body) == b"b"
        assert not peer.channel.closed.is_set()


async def test_a_refusal_comes_with_all_that_is_said_of_it_and_stops_what_is_sent_along() -> None:
    closed: list[bool] = []
    async with met(nothing) as peer:
        asking = asyncio.ensure_future(peer.channel.begin("X", "m", body=endless(closed)))
        await peer.hear(3)
        peer.say(Fail(1, "code", 418, "a sentence", "Name", "where it was"))
        with pytest.raises(Failure) as refused:
            await asking
        told = refused.value
        assert (told.code, told.status, told.message, told.name, told.detail) == (
            "code", 418, "a sentence", "Name", "where it was",
        )  # fmt: skip
        await eventually(lambda: closed == [True])
        assert peer.channel.num_open == 0


class Unread:
    """A body that must not be read, and counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __aiter__(self) -> "Unread":
        return self

    async def __anext__(self) -> bytes:
        raise AssertionError("its exchange is over")

    async def aclose(self) -> None:
        self.closed += 1


async def test_a_body_is_closed_though_the_exchange_fails_before_its_first_read() -> None:
    body = Unread()
    async with met(nothing) as peer:
        asking = asyncio.ensure_future(peer.channel.begin("X", "m", body=body))
        # Runs after the request and before the task that sends the body.
        asyncio.get_running_loop().call_soon(lambda: peer.say(Fail(1, "code", 403, "not allowed")))
        with pytest.raises(Failure):
            await asking
        await eventually(lambda: body.closed == 1)


async def test_an_answer_without_a_stream_ends_what_is_sent_along_and_one_with_a_stream_does_when_it_ends() -> None:
    for said in ((Reply(1, 1),), (Reply(1, 1, streamed=True), StreamEnd(1))):
        closed: list[bool] = []
        async with met(nothing) as peer:
            asking = asyncio.ensure_future(peer.channel.begin("X", "m", body=endless(closed)))
            await peer.hear(3)
            peer.say(*said)
            await asking
            await eventually(lambda closed=closed: closed == [True])


async def test_who_reads_no_more_of_an_answer_says_so_once_and_sends_no_more() -> None:
    closed: list[bool] = []
    async with met(nothing) as peer:
        asking = asyncio.ensure_future(peer.channel.begin("X", "m", body=endless(closed)))
        await peer.hear(1)
        peer.say(Reply(1, 1, streamed=True))
        body = (await asking).body
        assert body is not None
        body.cancel()
        body.cancel()
        await eventually(lambda: closed == [True])
        peer.channel.note("last")
        while not isinstance(peer.heard[-1], Note):
            await peer.hear(len(peer.heard) + 1)
        assert [frame for frame in peer.heard if isinstance(frame, Cancel)] == [Cancel(1)]
        assert peer.channel.num_open == 0


async def test_a_call_drops_the_stream_of_its_answer() -> None:
    async with met(nothing) as peer:
        calling = asyncio.ensure_future(peer.channel.call("X", "m"))
        await peer.hear(1)
        peer.say(Reply(1, "a", streamed=True))
        assert await calling == "a"
        assert (await peer.hear(2))[1] == Cancel(1)


async def test_the_body_that_comes_with_a_call_ends_with_what_the_other_side_says() -> None:
    told: list[Any] = []

    async def reads(frame: frames.Request, body: Inbound | None) -> str:
        assert body is not None
        try:
            told.append(await whole(body))
        except Failure as failure:
            told.append((failure.code, failure.status, failure.message, failure.name))
        return "read"

    async with met(reads) as peer:
        peer.say(BindingCall(2, "X", "m", streamed=True), StreamChunk(2, b"ab"), StreamChunk(2, b"c"), StreamEnd(2))
        peer.say(BindingCall(4, "X", "m", streamed=True), StreamChunk(4, b"ab"), Fail(4, "c", 418, "why", "Name"))
        assert sorted(frame.id for frame in await peer.hear(2)) == [2, 4]
        assert told == [b"abc", ("c", 418, "why", "Name")]
        assert peer.channel.num_open == 0


async def test_who_answers_is_stopped_when_the_other_side_leaves_and_its_body_has_ended() -> None:
    told: list[str] = []
    bodies: list[Inbound] = []

    async def hang(frame: frames.Request, body: Inbound | None) -> None:
        assert body is not None
        bodies.append(body)
        try:
            await asyncio.Event().wait()
        finally:
            told.append("stopped")

    async with met(hang) as peer:
        peer.say(BindingCall(2, "X", "m", streamed=True))
        await eventually(lambda: len(bodies) == 1)
        peer.say(Cancel(2))
        await eventually(lambda: peer.channel.num_open == 0)
        assert told == ["stopped"]
        with pytest.raises(Failure, match="the other side left"):
            await anext(bodies[0])


async def test_an_answers_stream_is_closed_when_its_reader_leaves_and_is_sent_as_credit_is_given() -> None:
    closed: list[bool] = []

    async def streams(frame: frames.Request, body: Inbound | None) -> AsyncIterator[bytes]:
        return endless(closed)

    async with met(streams) as peer:
        peer.say(BindingCall(2, "X", "m"))
        full = 1 + WINDOW_BYTES // 1000
        await peer.hear(full)
        assert peer.heard[0] == Reply(2, None, streamed=True)
        peer.say(More(2, 2000))
        await peer.hear(full + 2)
        peer.channel.note("last")
        assert (await peer.hear(full + 3))[-1] == Note(0, "last"), "nothing is sent without credit"
        peer.say(Cancel(2))
        await eventually(lambda: closed == [True])
        assert peer.channel.num_open == 0


async def test_as_many_exchanges_may_be_open_as_was_said_and_one_that_has_ended_makes_room() -> None:
    go = asyncio.Event()

    async def waits(frame: frames.Request, body: Inbound | None) -> str:
        await go.wait()
        return "done"

    async with met(waits, max_open=2) as peer:
        peer.say(*(BindingCall(id, "X", "m") for id in (2, 4, 6)))
        (refused,) = await peer.hear(1)
        assert isinstance(refused, Fail)
        assert (refused.id, refused.code, refused.status) == (6, "too_many_open", 429)
        go.set()
        await peer.hear(3)
        peer.say(BindingCall(8, "X", "m"))
        assert (await peer.hear(4))[3] == Reply(8, "done")


async def test_open_requests_and_unread_replies_may_hold_so_many_bytes_together() -> None:
    go = asyncio.Event()

    async def answers(frame: frames.Request, body: Inbound | None) -> Any:
        assert isinstance(frame, BindingCall)
        if frame.method == "put":
            await go.wait()
            return "done"
        return bytes(400)

    async with met(answers, is_runtime=True, max_held_bytes=1200) as peer:
        peer.say(*(BindingCall(id, "X", "put", [bytes(400)]) for id in (1, 3, 5)))
        (refused,) = await peer.hear(1)
        assert isinstance(refused, Fail)
        assert (refused.id, refused.code, refused.status) == (5, "overloaded", 429)
        go.set()
        await peer.hear(3)
        peer.channel.pause_writing()  # as if the isolate did not read
        peer.say(*(BindingCall(id, "X", "get") for id in (7, 9, 11, 13)))
        await eventually(lambda: peer.channel.held_bytes > 800)
        await asyncio.sleep(0)
        peer.channel.resume_writing()
        heard = (await peer.hear(7))[3:]
        assert sorted(type(frame).__name__ for frame in heard) == ["Fail", "Fail", "Reply", "Reply"]
        await eventually(lambda: peer.channel.held_bytes == 0)
        peer.say(BindingCall(15, "X", "put", [bytes(5000)]))
        assert (await peer.hear(8))[7] == Reply(15, "done"), "a single call may be as large as a frame"


async def test_notes_are_handed_on_and_a_ping_is_answered_only_where_there_is_room() -> None:
    notes: list[Note] = []
    async with met(nothing, on_note=notes.append) as peer:
        peer.say(Note(0, "ready", 3), Ping(2))
        assert (notes, await peer.hear(1)) == ([Note(0, "ready", 3)], [Pong(2)])
        peer.channel.pause_writing()
        peer.say(Ping(4))
        peer.channel.resume_writing()
        peer.say(Ping(6))
        assert (await peer.hear(2))[1] == Pong(6)
        peer.say(Pong(99))  # answers a ping that was never sent
        assert not peer.channel.closed.is_set()


async def test_a_closed_channel_keeps_its_first_reason_for_all_later_and_waiting_calls() -> None:
    async with met(nothing) as peer:
        pinging = asyncio.ensure_future(peer.channel.ping())
        asking = asyncio.ensure_future(peer.channel.call("X", "m"))
        await peer.hear(2)
        peer.channel.close("it was told to")
        peer.channel.close("and again")
        for waiting in (pinging, asking, peer.channel.call("X", "m"), peer.channel.ping()):
            with pytest.raises(ChannelClosed, match="it was told to"):
                await waiting


def test_what_is_said_of_a_failure_is_short_and_can_be_sent() -> None:
    failure = Failure("m" * 9000 + "\ud800", detail="first" + "d" * 70_000 + "\udfff", code=7, status=507, name="Name")
    told = fail_frame(3, failure)
    assert (told.id, told.code, told.status, told.name) == (3, 7, 507, "Name")
    assert (told.message, told.detail) == ("m" * 8192, "d" * 65_535 + "?")


class Coded(Exception):
    def __init__(self, code: object, status: object) -> None:
        super().__init__()
        self.code, self.status = code, status


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("k"), ("'k'", "internal_error", 500, "KeyError", 1)),
        (Coded(3040, 429), ("Coded", 3040, 429, "Coded", 1)),
        (Coded("full", 507), ("Coded", "full", 507, "Coded", 1)),
        (Coded(None, "507"), ("Coded", "internal_error", 500, "Coded", 1)),
        (Failure("m"), ("m", "internal_error", 500, "Error", 1)),
        (Failure("m", code=7, status=503, name="N", retry_after_s=9), ("m", 7, 503, "N", 9)),
        (ChannelClosed(), ("the connection to the other process is closed", "closed", 500, "ChannelClosed", 1)),
    ],
)
def test_whatever_goes_wrong_has_a_sentence_a_code_and_a_status(error: Exception, told: tuple[object, ...]) -> None:
    failure = as_failure(error)
    assert (failure.message, failure.code, failure.status, failure.name, failure.retry_after_s) == told
    assert (failure is error) == isinstance(error, Failure)
