"""The relay between a client's WebSocket and a function: either side may close, vanish, stall or send invalid data."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import MessageDecoder, SocketClose, encode
from pilotlight.functions.host.network.socket_relay import GOING_AWAY, SocketRelay
from pilotlight.functions.sandbox.limits import FunctionLimits
from tests.clock import Clock

LIMITS = FunctionLimits(socket_message_mib=0.001, socket_idle_s=60, socket_close_s=0.2, socket_stall_s=0.2)


class Ends:
    """A client (ASGI) and a function (two streams of messages), both played by the test."""

    def __init__(self, limits: FunctionLimits = LIMITS, **timing: Any) -> None:
        self.from_client: asyncio.Queue[Any] = asyncio.Queue()
        self.to_client: list[Any] = []
        self.from_function: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.to_function: list[Any] = []
        self.draining = asyncio.Event()
        self.is_stalled = False
        self.relay = SocketRelay(self.from_client.get, self._send, limits, **timing)
        self.running = asyncio.ensure_future(self._run())

    async def _send(self, message: Any) -> None:
        if self.is_stalled:
            await asyncio.Event().wait()
        self.to_client.append(message)
        if message["type"] == "websocket.close":
            self.disconnect(message["code"])  # as a client answers a close

    async def _run(self) -> None:
        taking = asyncio.ensure_future(self._take())
        try:
            await self.relay.run(self._stream(), self._drained())
        finally:
            taking.cancel()

    async def _take(self) -> None:
        decoder = MessageDecoder(1 << 20)
        async for data in self.relay.messages():
            for message in decoder.feed(data):
                self.to_function.append(message)
                if isinstance(message, SocketClose):
                    self.from_function.put_nowait(encode(message))
                    self.from_function.put_nowait(None)

    async def _stream(self) -> AsyncIterator[bytes]:
        while (item := await self.from_function.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def _drained(self) -> None:
        await self.draining.wait()

    def say(self, text: str) -> None:
        self.from_client.put_nowait({"type": "websocket.receive", "text": text, "bytes": None})

    def disconnect(self, code: int) -> None:
        self.from_client.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})

    async def ended(self) -> int | None:
        """Return the code of the close that the client received."""
        await asyncio.wait_for(self.running, 60)
        codes = [message["code"] for message in self.to_client if message["type"] == "websocket.close"]
        assert len(codes) <= 1
        return codes[0] if codes else None


async def test_what_each_side_says_reaches_the_other_and_its_close_too() -> None:
    ends = Ends()
    for text in ("a", "", "b"):
        ends.say(text)
    ends.from_function.put_nowait(encode("x") + encode(b"y")[:3])
    ends.from_function.put_nowait(encode(b"y")[3:])
    while len(ends.to_client) < 2:
        await asyncio.sleep(0.01)
    ends.disconnect(4000)
    assert await ends.ended() is None
    assert ends.to_function == ["a", "", "b", SocketClose(4000, "")]
    assert [message.get("text", message.get("bytes")) for message in ends.to_client] == ["x", b"y"]


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (encode(SocketClose(4001, "bye")), 4001),
        (encode(SocketClose(1005)), 1000),
        (encode(SocketClose(999)), 1011),
        (encode(SocketClose(1006)), 1011),
        (b"\x09garbage and more of it", 1011),
        (encode("x" * 5000), 1011),
        (None, 1011),
        (Failure("it crashed", code="crashed"), 1011),
        (Failure("replaced", code="closing"), 1012),
    ],
)
async def test_however_a_function_ends_its_client_gets_a_code(item: Any, code: int) -> None:
    ends = Ends()
    ends.from_function.put_nowait(item)
    assert await ends.ended() == code


async def test_a_message_beyond_the_limit_ends_both_with_1009() -> None:
    ends = Ends()
    ends.say("ü" * 600)
    assert await ends.ended() == 1009
    assert ends.to_function[0].code == 1009


async def test_a_drain_and_idleness_end_both() -> None:
    drained, idle = Ends(), Ends(replace(LIMITS, socket_idle_s=0.05))
    drained.draining.set()
    assert (await drained.ended(), await idle.ended()) == (1012, 1001)
    assert (drained.to_function[0].code, idle.to_function[0].code) == (1012, 1001)


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    ends = Ends()
    ends.is_stalled = True
    ends.from_function.put_nowait(encode("x"))
    assert await ends.ended() is None


async def test_a_client_that_leaves_during_the_handshake_ends_it() -> None:
    received: asyncio.Queue[Any] = asyncio.Queue()
    left = asyncio.Event()

    async def send(message: Any) -> None:
        raise AssertionError

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    received.put_nowait({"type": "websocket.disconnect", "code": 1006})
    with pytest.raises(ClientDisconnect):
        await SocketRelay(received.get, send, LIMITS).while_present(work())
    assert left.is_set()


class TurnedClock(Clock):
    """Sleeping advances the time at once, and an action runs halfway."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.slept: list[float] = []
        self.half_way: list[Callable[[], None]] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds / 2
        if self.half_way:
            self.half_way.pop(0)()
        for _ in range(20):
            await asyncio.sleep(0)
        self.now += seconds / 2


async def test_a_socket_is_idle_when_neither_side_has_spoken_for_so_long() -> None:
    clock = TurnedClock()
    ends = Ends(clock=clock, sleep=clock.sleep)
    clock.half_way += [lambda: ends.say("I am here"), lambda: ends.from_function.put_nowait(encode("so am I"))]
    assert await ends.ended() == GOING_AWAY
    assert clock.slept == [60.0, 30.0, 15.0 + 30.0]
    assert (ends.to_function[0], ends.to_client[0]) == ("I am here", {"type": "websocket.send", "text": "so am I"})
