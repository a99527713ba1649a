"""Calls from code that cannot await: the other side is in another thread, while this event loop is blocked."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.failure import ChannelClosed, Failure
from pilotlight.functions.channel.frames import BindingCall
from pilotlight.functions.channel.streams import Inbound


class Runtime:
    """The runtime's side of the channel, in a thread."""

    def __init__(self) -> None:
        self.channel: Channel | None = None

    async def __call__(self, frame: frames.Request, body: Inbound | None) -> Any:
        assert isinstance(frame, BindingCall)
        return await getattr(self, frame.method)(**frame.kwargs)

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self) -> None:
        raise Failure("there is no more room", code="storage_full", status=507)

    async def streamed(self) -> StreamingReply:
        async def endless() -> Any:
            while True:
                yield bytes(1 << 16)

        return StreamingReply("a value", endless())

    async def ask_back(self) -> str:
        """Send the function a request before answering its own."""
        assert self.channel is not None
        asked = asyncio.ensure_future(self.channel.call("FUNCTION", "greet"))
        await self.channel.ping()  # the blocked side replies, so all earlier requests have also arrived
        return "asked" if not asked.done() else "answered"

    async def leave(self) -> None:
        assert self.channel is not None
        self.channel.close()


@contextmanager
def other_side() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()

    async def serve() -> None:
        runtime = Runtime()
        runtime.channel = await Channel.open(theirs, runtime, is_runtime=True)
        await runtime.channel.closed.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()


async def opened(ours: socket.socket, heard: list[str]) -> Channel:
    async def answer(frame: Any, body: Any) -> str:
        heard.append(frame.method)
        return "hello"

    return await Channel.open(ours, answer, is_runtime=False)


async def closed(channel: Channel) -> None:
    channel.close()
    await channel.closed.wait()


@pytest.mark.parametrize("size", [0, 1, 3 << 20])  # the last size exceeds the buffers of the socket and the channel
async def test_a_call_brings_its_value_back_however_large_it_is(size: int) -> None:
    with other_side() as ours:
        channel = await opened(ours, [])
        for _ in range(2):
            assert channel.call_now("STORE", "echo", value=b"x" * size) == b"x" * size
        assert await channel.call("STORE", "echo", value=7) == 7, "the event loop still works"
        await closed(channel)


async def test_a_call_that_fails_says_how_and_leaves_the_channel_open() -> None:
    with other_side() as ours:
        channel = await opened(ours, [])
        with pytest.raises(Failure, match="there is no more room") as failed:
            channel.call_now("STORE", "fail")
        assert (failed.value.code, failed.value.status) == ("storage_full", 507)
        assert channel.call_now("STORE", "streamed") == "a value", "the unread stream is cancelled"
        assert channel.call_now("STORE", "echo", value=1) == 1
        await closed(channel)


async def test_requests_of_the_meantime_are_answered_when_the_loop_continues_but_pings_at_once() -> None:
    heard: list[str] = []
    with other_side() as ours:
        channel = await opened(ours, heard)
        assert channel.call_now("STORE", "ask_back") == "asked"
        assert heard == []
        async with asyncio.timeout(60):
            while not heard:
                await asyncio.sleep(0)
        assert heard == ["greet"]
        await closed(channel)


async def test_a_call_to_a_side_that_leaves_or_has_left_fails() -> None:
    with other_side() as ours:
        channel = await opened(ours, [])
        with pytest.raises(ChannelClosed, match="the other process closed the connection"):
            channel.call_now("STORE", "leave")
        await closed(channel)
        with pytest.raises(ChannelClosed, match="closed"):
            channel.call_now("STORE", "echo", value=1)
