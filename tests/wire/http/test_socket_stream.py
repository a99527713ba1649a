"""What Hypercorn's WebSockets do with what clients may send: hostile frames, cut anywhere, close codes, applications that stopped reading."""

import asyncio
import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypercorn.config import Config
from hypercorn.protocol.events import Data, Event, Request, Response, StreamClosed
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.http.socket_stream import SocketStream, install

HANDSHAKE = [
    (b"host", b"x"),
    (b"connection", b"Upgrade"),
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="),
    (b"sec-websocket-extensions", b"permessage-deflate"),
]
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, mask: bytes | None = b"\1\2\3\4", rsv: int = 0
) -> bytes:
    size = len(payload)
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    masked = 0x80 if mask is not None else 0
    if size < 126:
        head += bytes([masked | size])
    elif size < 1 << 16:
        head += bytes([masked | 126]) + struct.pack("!H", size)
    else:
        head += bytes([masked | 127]) + struct.pack("!Q", size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


class Connection:
    """The stream, its application's messages, and what is written to the client."""

    def __init__(self, max_bytes: int = 1000, room: int = 10) -> None:
        config = Config()
        config.websocket_max_message_size = max_bytes
        self.received: asyncio.Queue[Any] = asyncio.Queue(room)
        self.written: list[Event] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.stream = SocketStream(self._app, config, None, self, False, ("c", 1), ("s", 2), self._send, 1)  # type: ignore[arg-type]

    async def open(self, **accept: Any) -> "Connection":
        await self.stream.handle(Request(1, list(HANDSHAKE), "1.1", "GET", b"/", {}))  # type: ignore[arg-type]
        assert (await self.received.get())["type"] == "websocket.connect"
        await self.stream.app_send({"type": "websocket.accept", "headers": [], **accept})
        return self

    async def feed(self, data: bytes, at: list[int] | None = None) -> None:
        cuts = [0, *sorted(cut % (len(data) + 1) for cut in at or ()), len(data)]
        for start, end in itertools.pairwise(cuts):
            await self.stream.handle(Data(1, data[start:end]))

    @property
    def messages(self) -> list[Any]:
        found = []
        while not self.received.empty():
            found.append(self.received.get_nowait())
        return found

    @property
    def close_code(self) -> int | None:
        """Of the close frame that was written."""
        for event in self.written:
            if isinstance(event, Data) and event.data[0] == 0x80 | CLOSE:
                return int.from_bytes(event.data[2:4], "big") if event.data[1] else 1005
        return None

    async def __aenter__(self) -> "Connection":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.stream._ended.set()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # Hypercorn's task group

    async def spawn_app(self, *_: Any) -> Callable[[Any], Any]:
        return self.received.put

    def spawn(self, function: Any, *arguments: Any) -> None:
        self.tasks.append(asyncio.ensure_future(function(*arguments)))

    async def _app(self, *_: Any) -> None:
        raise AssertionError("spawned by nobody")

    async def _send(self, event: Event) -> None:
        self.written.append(event)
        if isinstance(event, StreamClosed):
            await self.stream.handle(event)  # as HTTP/1.1's connection does


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(frame(TEXT, b"x", mask=None), 1002, id="not masked"),
        pytest.param(frame(3, b"x"), 1002, id="an opcode that is none"),
        pytest.param(frame(TEXT, b"x", rsv=4), 1002, id="compressed, which was not agreed on"),
        pytest.param(frame(PING, b"x" * 126), 1002, id="a ping that is too long"),
        pytest.param(frame(PING, b"x", fin=False), 1002, id="a ping in pieces"),
        pytest.param(frame(0, b"x"), 1002, id="a continuation of nothing"),
        pytest.param(frame(TEXT, b"x", fin=False) + frame(TEXT, b"y"), 1002, id="a text within a text"),
        pytest.param(frame(CLOSE, b"\x03"), 1002, id="half a close code"),
        pytest.param(frame(CLOSE, struct.pack("!H", 999)), 1002, id="a close code that is none"),
        pytest.param(frame(CLOSE, struct.pack("!H", 1005)), 1002, id="a close code that may not be sent"),
        pytest.param(frame(CLOSE, struct.pack("!H", 1000) + b"\xff"), 1007, id="a reason that is no UTF-8"),
        pytest.param(frame(TEXT, b"\xc3\x28"), 1007, id="a text that is no UTF-8"),
        pytest.param(frame(TEXT, b"\xc3"), 1007, id="a text that ends within a character"),
        pytest.param(frame(TEXT, b"x" * 1001), 1009, id="a text that is too long"),
        pytest.param(frame(BINARY, b"x" * 600, fin=False) + frame(0, b"x" * 600), 1009, id="too long in two pieces"),
        pytest.param(b"\x82\xff" + b"\xff" * 8 + b"\1\2\3\4", 1002, id="a length beyond 63 bits"),
        pytest.param(b"\x82\xff" + struct.pack("!Q", 1 << 40) + b"\1\2\3\4" + b"x" * 2000, 1009, id="a terabyte"),
    ],
)
async def test_a_broken_frame_ends_the_socket_with_the_code_that_says_why(data: bytes, code: int) -> None:
    async with Connection() as connection:
        await connection.feed(frame(TEXT, b"before") + data + frame(TEXT, b"after"))
        assert connection.close_code == code
        assert connection.stream.closed
        first, last = connection.messages
        assert first["text"] == "before"
        assert (last["type"], last["code"]) == ("websocket.disconnect", code)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=300), st.binary(max_size=300)), max_size=5),
    st.lists(st.integers(0, 4000), max_size=6),
    st.integers(1, 300),
    st.booleans(),
)
def test_messages_arrive_whole_wherever_they_are_cut(
    messages: list[str | bytes], cuts: list[int], piece: int, pings: bool
) -> None:
    data = b""
    for message in messages:
        opcode, raw = (TEXT, message.encode()) if isinstance(message, str) else (BINARY, message)
        parts = [raw[i : i + piece] for i in range(0, len(raw), piece)] or [b""]
        for i, part in enumerate(parts):
            data += frame(opcode if i == 0 else 0, part, fin=i == len(parts) - 1)
            data += frame(PING, b"p") if pings else b""
    data += frame(CLOSE, struct.pack("!H", 4000) + b"bye")

    async def run() -> None:
        async with Connection(2000, room=20) as connection:
            await connection.feed(data, cuts)
            *got, end = connection.messages
            assert [m["text"] if m["text"] is not None else m["bytes"] for m in got] == messages
            assert end == {"type": "websocket.disconnect", "code": 4000, "reason": "bye"}
            assert connection.close_code == 4000

    asyncio.run(run())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4))
def test_any_bytes_at_all_end_in_messages_or_in_a_close(data: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        async with Connection(200, room=500) as connection:
            await connection.feed(data, cuts)
            assert connection.stream.closed == any(m["type"] == "websocket.disconnect" for m in connection.messages)

    asyncio.run(run())


async def test_no_compression_is_agreed_on() -> None:
    async with Connection() as connection:
        response = next(event for event in connection.written if isinstance(event, Response))
        assert response.status_code == 101
        assert b"sec-websocket-extensions" not in dict(response.headers)


async def test_a_lost_connection_is_1006_and_wakes_who_waits_for_room() -> None:
    async with Connection(room=2) as connection:
        feeding = asyncio.create_task(connection.feed(frame(TEXT, b"x") * 5))
        await asyncio.sleep(0)
        assert not feeding.done()
        await connection.stream.handle(StreamClosed(1))
        assert [message.get("text", message.get("code")) for message in connection.messages] == ["x", 1006]
        await asyncio.wait_for(feeding, 5)


async def test_an_application_that_ends_leaves_nobody_waiting() -> None:
    async with Connection(room=2) as connection:
        feeding = asyncio.create_task(connection.feed(frame(TEXT, b"x") * 5))
        await asyncio.sleep(0)
        await asyncio.wait_for(connection.stream.app_send(None), 5)
        await asyncio.wait_for(feeding, 5)
        assert connection.close_code == 1011


async def test_a_silent_client_is_pinged_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.http.socket_stream.PING_S", 0.01)
    monkeypatch.setattr("wire.http.socket_stream.LOST_S", 0.05)
    async with Connection() as connection:
        assert (await asyncio.wait_for(connection.received.get(), 5))["code"] == 1006
        assert any(isinstance(event, Data) and event.data[0] == 0x80 | PING for event in connection.written)


def test_it_is_put_where_hypercorn_looks_for_it() -> None:
    import hypercorn.protocol.h11

    install()
    assert hypercorn.protocol.h11.WSStream is SocketStream  # type: ignore[attr-defined]
