"""An open WebSocket: valid and hostile frames, split anywhere, close codes, and applications that stop reading."""

import asyncio
import itertools
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.websocket import FRAMES_AT_ONCE, HELD_MESSAGES, SocketTimings, WebSocket, WebSocketClose
from tests.asgi import eventually
from tests.edge_router.raw import Wire, wire
from tests.wire.http.test_server import served

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


class Transport(asyncio.Transport):
    """A transport that records writes to the peer."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.has_ended = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.has_ended

    def close(self) -> None:
        self.has_ended = True

    abort = close

    def set_protocol(self, protocol: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Peer:
    """An open WebSocket on a fake transport, fed with the frames of a peer."""

    def __init__(self, max_bytes: int = 1000, timings: SocketTimings | None = None) -> None:
        self.transport = Transport()
        self.socket = WebSocket(
            self.transport, is_client=False, early=b"", max_message_bytes=max_bytes, timings=timings
        )

    def feed(self, data: bytes, at: list[int] | None = None) -> None:
        cuts = [0, *sorted(cut % (len(data) + 1) for cut in at or ()), len(data)]
        for start, end in itertools.pairwise(cuts):
            self.socket.data_received(data[start:end])

    async def messages(self) -> list[Any]:
        """Return all messages so far, up to a WebSocketClose."""
        found: list[Any] = []
        while self.socket.is_behind:
            await asyncio.sleep(0)
        while not (found and isinstance(found[-1], WebSocketClose)):
            try:
                async with asyncio.timeout(0):
                    found.append(await self.socket.receive())
            except TimeoutError:
                break
        return found

    @property
    def close_code(self) -> int | None:
        """Return the code of the close frame that was written last."""
        at = self.transport.written.rfind(bytes([0x80 | CLOSE]))
        if at < 0:
            return None
        return (
            int.from_bytes(self.transport.written[at + 2 : at + 4], "big") if self.transport.written[at + 1] else 1005
        )

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.connection_lost(None)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(frame(TEXT, b"x", mask=None), 1002, id="not masked"),
        pytest.param(frame(3, b"x"), 1002, id="an invalid opcode"),
        pytest.param(frame(TEXT, b"x", rsv=4), 1002, id="compressed, which was not agreed on"),
        pytest.param(frame(PING, b"x" * 126), 1002, id="a ping that is too long"),
        pytest.param(frame(PING, b"x", fin=False), 1002, id="a ping in pieces"),
        pytest.param(frame(0, b"x"), 1002, id="a continuation of nothing"),
        pytest.param(frame(TEXT, b"x", fin=False) + frame(TEXT, b"y"), 1002, id="a text within a text"),
        pytest.param(frame(CLOSE, b"\x03"), 1002, id="half a close code"),
        pytest.param(frame(CLOSE, struct.pack("!H", 999)), 1002, id="an invalid close code"),
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
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"before") + data + frame(TEXT, b"after"))
        assert peer.close_code == code
        first, last = await peer.messages()
        assert first == "before"
        assert last.code == code


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
        async with Peer(2000) as peer:
            peer.feed(data, cuts)
            assert await peer.messages() == [*messages, WebSocketClose(4000, "bye")]
            assert peer.close_code == 4000

    asyncio.run(run())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4))
def test_any_bytes_at_all_end_in_messages_or_in_a_close(data: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        async with Peer(200) as peer:
            peer.feed(data, cuts)
            messages = await peer.messages()
            assert (peer.close_code is not None) >= any(isinstance(message, WebSocketClose) for message in messages)

    asyncio.run(run())


async def test_each_message_may_be_as_large_as_the_limit() -> None:
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"x" * 1000) + frame(BINARY, b"y" * 500, fin=False) + frame(0, b"y" * 500))
        assert await peer.messages() == ["x" * 1000, b"y" * 1000]


async def test_a_lost_connection_is_1006_after_the_received_messages() -> None:
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"x"))
        peer.socket.connection_lost(None)
        assert await peer.messages() == ["x", WebSocketClose(1006)]


async def test_a_peer_is_not_read_without_a_receiver_and_read_again_afterwards() -> None:
    async with Peer() as peer:
        for _ in range(HELD_MESSAGES + 1):
            peer.feed(frame(TEXT, b"x"))
        assert not peer.transport.reads
        await peer.socket.receive()
        assert peer.transport.reads


@pytest.mark.parametrize("opcode", [TEXT, PING, 0])
async def test_many_frames_that_come_at_once_are_read_a_few_at_a_time_and_the_peer_meanwhile_is_not(
    opcode: int,
) -> None:
    """A small frame costs as much time as a thousand bytes of a large one, so other connections get turns in between."""
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"", fin=False) if opcode == 0 else b"")
        peer.feed(frame(opcode, b"", fin=opcode != 0) * 1000 + frame(0 if opcode == 0 else TEXT, b"end"))
        num_turns = 0
        while peer.socket.is_behind:
            assert not peer.transport.reads
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns >= 1000 // FRAMES_AT_ONCE
        messages = await peer.messages()
        assert messages == ["", *[""] * 999, "end"][-len(messages) :]
        assert len(messages) == (1001 if opcode == TEXT else 1)
        assert peer.transport.reads


async def test_a_peer_that_got_the_end_is_read_to_its_own_end_when_its_frames_are_sent() -> None:
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"x") * 200)
        peer.socket.close(4000)
        assert not peer.transport.reads, "reading stays paused: the peer could fill the memory"
        while peer.socket.is_behind:
            await asyncio.sleep(0)
        assert peer.transport.reads
        peer.feed(frame(CLOSE, struct.pack("!H", 4000)))
        assert (await peer.messages())[-1] == WebSocketClose(4000)


async def test_nothing_after_a_close_is_looked_at() -> None:
    async with Peer() as peer:
        peer.feed(
            frame(CLOSE, struct.pack("!H", 4000)) + frame(TEXT, b"x") * 1000 + frame(CLOSE, struct.pack("!H", 4001))
        )
        assert not peer.socket.is_behind
        assert await peer.messages() == [WebSocketClose(4000)]


async def test_what_came_before_a_connection_was_lost_is_handed_on() -> None:
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"x") * 200 + frame(CLOSE, struct.pack("!H", 4000)))
        peer.socket.connection_lost(None)
        assert await peer.messages() == ["x"] * 200 + [WebSocketClose(4000)]


@pytest.mark.long
async def test_pieces_without_anything_in_them_cost_no_memory() -> None:
    async with Peer() as peer:
        peer.feed(frame(TEXT, b"a", fin=False))
        tracemalloc.start()
        try:
            for _ in range(20):
                peer.feed(frame(0, fin=False) * 1000)
                while peer.socket.is_behind:
                    await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[0] < 50_000
        finally:
            tracemalloc.stop()
        peer.feed(frame(0, b"b"))
        assert await peer.messages() == ["ab"]


async def test_a_writer_waits_for_a_peer_that_takes_nothing_and_continues_when_it_leaves() -> None:
    async with Peer() as peer:
        peer.socket.pause_writing()
        sending = asyncio.create_task(peer.socket.send("x"))
        await asyncio.sleep(0)
        assert not sending.done()
        peer.feed(frame(PING, b"p"))
        assert bytes([0x80 | PONG]) not in peer.transport.written
        peer.socket.connection_lost(None)
        await asyncio.wait_for(sending, 60)


async def test_a_writer_continues_when_its_peer_takes_more() -> None:
    async with Peer() as peer:
        peer.socket.pause_writing()
        sending = asyncio.create_task(peer.socket.send("x"))
        await asyncio.sleep(0)
        peer.socket.resume_writing()
        await asyncio.wait_for(sending, 60)
        await asyncio.wait_for(peer.socket.send("y"), 60)
        assert peer.transport.written == b"\x81\x01x\x81\x01y"


async def test_a_connection_that_is_gone_when_it_becomes_a_socket_is_a_lost_one() -> None:
    lost: list[bool] = []
    transport = Transport()
    transport.close()
    socket = WebSocket(
        transport, is_client=False, early=frame(TEXT, b"x"), max_message_bytes=9, on_lost=lambda: lost.append(True)
    )
    assert (await socket.receive(), lost) == (WebSocketClose(1006), [True])


async def test_a_close_waits_for_the_peers_own_and_not_for_ever() -> None:
    for answer in (frame(CLOSE, struct.pack("!H", 1000)), frame(TEXT, b"not yet")):
        async with Peer(timings=SocketTimings(close_s=0.05)) as peer:
            peer.socket.close(4001, "enough")
            assert peer.close_code == 4001
            peer.feed(answer)
            await eventually(lambda peer=peer: peer.transport.has_ended)


async def test_a_silent_peer_is_pinged_and_then_given_up() -> None:
    async with Peer(timings=SocketTimings(ping_s=0.01, lost_s=0.05)) as peer:
        await eventually(lambda: peer.transport.has_ended)
        assert bytes([0x80 | PING, 0]) in peer.transport.written


async def test_a_peer_that_sends_but_reads_nothing_is_given_up() -> None:
    async with Peer(timings=SocketTimings(ping_s=0.01, lost_s=0.05)) as peer:
        peer.socket.pause_writing()
        sending = asyncio.create_task(peer.socket.send("x"))
        async with asyncio.timeout(60):
            while not peer.transport.has_ended:
                peer.feed(frame(PING, b"p"))
                await asyncio.sleep(0.01)
        peer.socket.connection_lost(None)
        await asyncio.wait_for(sending, 60)


HANDSHAKE = (
    b"GET /chat?a=b HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-protocol: a, b\r\nsec-websocket-extensions: permessage-deflate\r\n\r\n"
)


class App:
    """An application that sends `answers`, then echoes messages until the client disconnects."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers or ({"type": "websocket.accept", "subprotocol": "b", "headers": [(b"x", b"y")]},)
        self.scope: dict[str, Any] = {}
        self.heard: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        self.heard.append(await receive())
        for answer in self.answers:
            await send(answer)
        while self.heard[-1]["type"] != "websocket.disconnect":
            self.heard.append(message := await receive())
            if message["type"] == "websocket.receive":
                await send({**message, "type": "websocket.send"})


async def shaken(client: Wire, behind: bytes = b"") -> bytes:
    await client.say(HANDSHAKE + behind)
    return await client.hear_until(b"\r\n\r\n")


@pytest.mark.process
async def test_an_application_sees_a_websocket_and_its_client_the_agreed_protocol() -> None:
    app = App()
    async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        head = await shaken(client)
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
        assert b"\r\nsec-websocket-protocol: b\r\n" in head
        assert b"\r\nx: y\r\n" in head
        assert b"extensions" not in head, "compression is refused: 64 KiB could expand to 64 MiB"
        assert (app.scope["type"], app.scope["scheme"], app.scope["path"]) == ("websocket", "ws", "/chat")
        assert app.scope["subprotocols"] == ["a", "b"]
        assert "method" not in app.scope
        await client.say(frame(TEXT, "ü".encode()), frame(BINARY, b"\0"))
        assert await client.reader.readexactly(7) == b"\x81\x02\xc3\xbc\x82\x01\0"
        await client.say(frame(CLOSE, struct.pack("!H", 4000) + b"bye"))
        assert await client.hear_all() == b"\x88\x05\x0f\xa0bye"
        await eventually(lambda: not server.connections)
    assert app.heard[-1] == {"type": "websocket.disconnect", "code": 4000, "reason": "bye"}


@pytest.mark.process
async def test_messages_before_the_answer_are_heard_after_it() -> None:
    async with served(App()) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await shaken(client, frame(TEXT, b"early"))
        assert await client.reader.readexactly(7) == b"\x81\x05early"


@pytest.mark.process
async def test_a_refusal_is_a_plain_response() -> None:
    start = {"type": "websocket.http.response.start", "status": 418, "headers": [(b"content-length", b"2")]}
    body = {"type": "websocket.http.response.body", "body": b"no"}
    for answers, status in (((start, body), b"418"), (({"type": "websocket.close"},), b"403")):
        app = App(*answers)
        async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
            await client.say(HANDSHAKE)
            head, _, rest = (await client.hear_all()).partition(b"\r\n\r\n")
            assert head.split()[1] == status
            assert rest == (b"no" if status == b"418" else b"")
            await eventually(lambda app=app: app.heard[-1]["type"] == "websocket.disconnect")


@pytest.mark.process
async def test_an_application_ends_a_socket_with_its_own_code_and_reason() -> None:
    accept = {"type": "websocket.accept"}
    ends: tuple[tuple[dict[str, Any], bytes], ...] = (
        ({"code": 4000, "reason": "bye"}, b"\x88\x05\x0f\xa0bye"),
        ({}, b"\x88\x02\x03\xe8"),
        ({"code": None, "reason": None}, b"\x88\x02\x03\xe8"),
    )
    for end, said in ends:
        app = App(accept, {"type": "websocket.close", **end})
        async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
            await shaken(client)
            await client.say(frame(CLOSE))
            assert await client.hear_all() == said


@pytest.mark.process
async def test_a_client_that_sends_on_has_time_to_hear_why_the_server_closes() -> None:
    """A connection closed at once would be reset by the client's further bytes, even with unread data in its buffer."""
    app = App({"type": "websocket.accept"}, {"type": "websocket.close", "code": 4000, "reason": "bye"})
    async with served(app, HttpLimits(close_s=30.0)) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await client.say(HANDSHAKE)
        assert (await client.hear_until(b"\x88\x05\x0f\xa0bye")).startswith(b"HTTP/1.1 101")
        for _ in range(3):
            await client.say(frame(BINARY, b"m" * 65535))
        assert server.connections
        assert not client.reader.at_eof()
        client.writer.close()
        await eventually(lambda: not server.connections)


@pytest.mark.process
@pytest.mark.parametrize(
    "answers", [("websocket.accept", "websocket.accept"), ("websocket.send",), ("http.response.start",)]
)
async def test_an_application_that_sends_out_of_turn_is_refused_and_so_is_its_client(answers: tuple[str, ...]) -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind in answers:
            try:
                await send({"type": kind, "text": "x", "status": 200, "headers": []})
            except ValueError as error:
                heard.append(str(error))
                raise

    async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        is_accepted = answers[0] == "websocket.accept"
        assert (await shaken(client)).split()[1] == (b"101" if is_accepted else b"500")
        await client.say(frame(CLOSE))
        assert (await client.hear_all() == b"\x88\x02\x03\xf3") is is_accepted
    assert heard == [f"{answers[-1]} {'behind' if is_accepted else 'before'} websocket.accept"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ((b"sec-websocket-version: 13", b"sec-websocket-version: 12"), b"426"),
        ((b"sec-websocket-version: 13\r\n", b""), b"400"),
        ((b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""), b"400"),
    ],
)
async def test_an_invalid_handshake_never_reaches_the_application(change: tuple[bytes, bytes], status: bytes) -> None:
    app = App()
    async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await client.say(HANDSHAKE.replace(*change))
        assert (await client.hear_all()).split()[1] == status
    assert app.heard == []


@pytest.mark.process
async def test_an_application_that_ends_without_an_answer_is_reported() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        raise RuntimeError("broken")

    async def returns(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
        pass

    for app, last in ((fails, b"\x88\x02\x03\xf3"), (returns, b"\x88\x02\x03\xf3"), (says_nothing, b"")):
        async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
            head = await shaken(client)
            assert head.startswith(b"HTTP/1.1 101" if last else b"HTTP/1.1 500")
            await client.say(frame(CLOSE))
            assert await client.hear_all() == last


@pytest.mark.process
async def test_a_message_beyond_the_servers_limit_ends_the_socket() -> None:
    limits = HttpLimits(max_message_bytes=100)
    async with served(App(), limits) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await shaken(client)
        await client.say(frame(BINARY, b"x" * 101))
        assert (await client.hear_all()).startswith(b"\x88\x1a\x03\xf1")


@pytest.mark.process
async def test_a_client_that_leaves_during_its_handshake_is_reported() -> None:
    heard: list[dict[str, Any]] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    async with served(slow) as server:
        async with wire(server.url) as client:  # type: ignore[attr-defined]
            await client.say(HANDSHAKE)
            await eventually(lambda: bool(heard) or bool(server.connections))
        await eventually(lambda: len(heard) == 2)
        assert heard[1]["type"] == "websocket.disconnect"
