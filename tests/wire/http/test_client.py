"""Connections from a router to a site: each response belongs to its request, and connections are reused safely."""

import asyncio
import errno
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.wire.http.client import (
    HELD_BYTES,
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    CannotConnect,
    ConnectionLost,
    ConnectionPool,
    NoDescriptors,
    Origin,
    PieceTaker,
    ResponseParser,
    UpstreamConnection,
)

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"


@asynccontextmanager
async def site(*answers: bytes) -> AsyncIterator[Origin]:
    """Start a server that sends one of the answers, in order, for each request on a connection."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Origin.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await ended.wait()


async def ask(connection: UpstreamConnection) -> tuple[int, bytes]:
    connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"")
    await connection.head()
    status, body = connection.response.status, b""
    while part := await connection.read():
        body += part
    return status, body


@pytest.mark.process
@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 201 Created\r\ncontent-length: 3\r\n\r\ntwo", b"HTTP/1.1 201 Cr", b"surplus"]
)
async def test_bytes_after_an_answer_belong_to_no_request(behind: bytes) -> None:
    async with asyncio.timeout(60), site(ANSWER + b"one" + behind) as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        assert await ask(connection) == (200, b"one")
        pool.put_back(connection)
        try:
            assert pool.idle(origin) is None
        finally:
            pool.close()


@pytest.mark.process
async def test_an_answer_that_ends_where_it_should_leaves_its_connection_to_the_next_request() -> None:
    early_hints = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with asyncio.timeout(60), site(ANSWER + b"one", early_hints + ANSWER + b"two") as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        assert await ask(connection) == (200, b"one")
        pool.put_back(connection)
        again = pool.idle(origin)
        assert again is connection
        assert await ask(again) == (200, b"two")
        pool.close()


@pytest.mark.process
async def test_a_site_that_closes_a_connection_at_once_has_not_had_the_request() -> None:
    async with asyncio.timeout(60), site() as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        connection.eof_received()
        with pytest.raises(CannotConnect, match="closed the connection at once"):
            connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"")
        pool.close()


async def test_a_router_without_descriptors_blames_no_site() -> None:
    async def connect(*_: object) -> UpstreamConnection:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(NoDescriptors, match="the router has no file descriptors left"):
        await ConnectionPool(connect_timeout_s=2, connect=connect).connect(Origin.of("http://127.0.0.1:1"))


def parsed(*pieces: bytes, **expected: bool) -> ResponseParser:
    parser = ResponseParser()
    parser.expect(**expected)
    for piece in pieces:
        parser.feed(piece)
    return parser


def test_an_answer_without_a_length_ends_with_its_connection_and_one_with_a_length_does_not() -> None:
    free = parsed(b"HTTP/1.1 200 OK\r\n\r\n", b"ab", b"c")
    assert (free.has_head, free.is_done, free.take(), free.held_bytes) == (True, False, b"abc", 0)
    free.end()
    assert (free.is_done, free.is_reusable) == (True, False)
    for cut in (ANSWER + b"on", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\non\r\n", ANSWER[:30]):
        lost = parsed(cut)
        lost.end()
        assert not lost.is_done, cut


@pytest.mark.parametrize(
    ("answer", "is_reusable"),
    [
        (ANSWER + b"one", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\none\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", False),
    ],
)
def test_a_connection_is_used_again_where_the_answer_says_so(answer: bytes, is_reusable: bool) -> None:
    whole, in_bytes = parsed(answer), parsed(*(answer[i : i + 1] for i in range(len(answer))))
    assert (whole.is_done, whole.is_reusable) == (in_bytes.is_done, in_bytes.is_reusable) == (True, is_reusable)
    assert whole.take() == in_bytes.take()


def test_a_head_request_has_no_body_whatever_its_answer_says() -> None:
    parser = parsed(ANSWER, is_head_request=True)
    assert (parser.is_done, parser.header("content-length"), parser.take(), parser.is_reusable) == (
        True, "3", b"", False,
    )  # fmt: skip


def test_a_head_has_a_size_and_a_body_has_none_here() -> None:
    with pytest.raises(ConnectionLost, match="headers of more than 64 KiB"):
        parsed(b"HTTP/1.1 200 OK\r\nx: ", b"x" * MAX_HEAD_BYTES)
    assert parsed(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MAX_HEAD_BYTES).held_bytes == MAX_HEAD_BYTES
    start, end = b"HTTP/1.1 200 OK\r\nx: ", b"\r\n\r\n"
    room = b"x" * (MAX_HEAD_BYTES - len(start))
    assert parsed(start, room, end).has_head, "an incomplete head may be as large as the limit"
    with pytest.raises(ConnectionLost, match="invalid HTTP"):
        parsed(b"SSH-2.0\r\n")


def test_protocols_are_switched_where_that_was_asked_for() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    with pytest.raises(ConnectionLost, match="without a request"):
        parsed(switch)
    parser = parsed(switch + b"ab", b"c", may_switch=True)
    assert (parser.status, parser.switched, parser.has_head, parser.is_reusable) == (101, b"abc", True, False)
    assert parsed(ANSWER + b"one", may_switch=True).switched is None


def test_bytes_before_the_answer_are_no_part_of_it() -> None:
    parser = parsed(
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + ANSWER.replace(b"\r\n\r\n", b"\r\na: 1\r\nA: 2\r\n\r\n")
    )
    assert (parser.status, parser.header("link"), parser.header("a")) == (200, "", "1")


class Transport:
    """A fake transport that sends nothing."""

    def __init__(self) -> None:
        self.is_open, self.is_read = True, True

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        self.is_open = False

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


PLACE = Origin.of("http://127.0.0.1:1")


def connected() -> tuple[UpstreamConnection, Transport]:
    connection, transport = UpstreamConnection(PLACE), Transport()
    connection.connection_made(cast(Any, transport))
    return connection, transport


async def test_the_connection_used_last_is_given_and_those_that_waited_too_long_are_closed() -> None:
    now = 1000.0
    pool, made = ConnectionPool(1.0, clock=lambda: now), [connected() for _ in range(3)]
    for connection, _ in made:
        pool.put_back(connection)
        now += 1.0
    assert pool.idle(PLACE) is made[2][0]
    assert pool.idle(Origin.of("http://127.0.0.1:2")) is None
    now = 1000.0 + KEEP_ALIVE_S
    pool.sweep()
    assert [transport.is_open for _, transport in made] == [False, True, True]
    now += 1.0
    assert pool.idle(PLACE) is None, "it has been idle for too long since the sweep"
    assert not made[1][1].is_open
    busy, transport = connected()
    busy.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    pool.put_back(busy)
    assert not transport.is_open, "its response was not read to the end"


async def test_of_an_origin_that_is_asked_no_more_nothing_is_kept() -> None:
    pool, (connection, transport) = ConnectionPool(1.0), connected()
    pool.put_back(connection)
    transport.is_open = False  # the site closed it
    pool.sweep()
    kept = weakref.ref(connection)
    del connection, transport
    gc.collect()
    assert kept() is None


async def test_a_pool_that_ends_closes_what_it_has_opened_but_for_what_it_gave_away() -> None:
    made = [connected() for _ in range(3)]
    opening = iter(made)

    async def connect(*_: object) -> UpstreamConnection:
        return next(opening)[0]

    pool = ConnectionPool(1.0, connect=connect)
    for _ in made:
        await pool.connect(PLACE)
    pool.put_back(made[0][0])
    pool.give_away(made[1][0])
    pool.close()
    assert [transport.is_open for _, transport in made] == [False, True, False]
    assert pool.idle(PLACE) is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "cannot connect: Connection"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1)"), "cannot connect: none of its"),
        (ssl.SSLError("no such certificate"), "cannot connect: ('no such certificate'"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "cannot connect: Name or"),
        (None, "no connection within 0.01 s"),
    ],
)
async def test_a_connection_that_cannot_be_made_says_why(error: OSError | None, says: str) -> None:
    async def connect(*_: object) -> UpstreamConnection:
        if error is not None:
            raise error
        return await asyncio.Future()

    with pytest.raises(CannotConnect) as failed:
        await ConnectionPool(0.01, connect=connect).connect(PLACE)
    assert str(failed.value).startswith(says)
    assert not isinstance(failed.value, NoDescriptors), "these errors are the site's"


@pytest.mark.parametrize(("url", "is_tls"), [("http://h:1", False), ("https://h:1", True)])
async def test_a_sites_certificate_is_asked_for_where_its_url_says_so(url: str, is_tls: bool) -> None:
    seen: list[ssl.SSLContext | None] = []

    async def connect(origin: Origin, buffer: bytearray, tls: ssl.SSLContext | None) -> UpstreamConnection:
        seen.append(tls)
        return connected()[0]

    pool = ConnectionPool(1.0, connect=connect)
    for _ in range(2):
        await pool.connect(Origin.of(url))
    assert seen[0] is seen[1], "all connections share one TLS context"
    if is_tls:
        assert seen[0] is not None
        assert (seen[0].verify_mode, seen[0].check_hostname) == (ssl.CERT_REQUIRED, True)
    else:
        assert seen[0] is None


async def test_a_peer_is_read_no_further_than_its_bytes_are_taken() -> None:
    connection, transport = connected()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * HELD_BYTES)
    assert transport.is_read
    connection.data_received(b"x")
    assert not transport.is_read
    assert len(await connection.read()) == HELD_BYTES + 1
    assert transport.is_read
    connection.interrupt(TimeoutError("it is late"))
    connection.interrupt(ValueError("a later reason"))
    with pytest.raises(TimeoutError, match="it is late"):
        await connection.read()


async def test_a_connection_that_is_lost_ends_the_wait_for_its_answer_and_bytes_unasked_for_end_it() -> None:
    connection, _ = connected()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    waiting = asyncio.create_task(connection.head())
    await asyncio.sleep(0)
    connection.connection_lost(None)
    with pytest.raises(ConnectionLost, match="it closed the connection"):
        await waiting
    assert not connection.is_fit
    quiet, transport = connected()
    assert quiet.is_fit
    quiet.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert (quiet.is_fit, transport.is_open) == (False, False)


def test_an_origin_is_where_a_url_leads() -> None:
    assert Origin.of("https://user:key@sites.example/x") == Origin("sites.example", 443, True, "sites.example")
    assert Origin.of("http://[::1]:8080") == Origin("::1", 8080, False, "[::1]:8080")
    assert Origin.of("http://sites.example").port == 80


async def test_a_pump_gives_each_piece_to_its_taker_without_waking_the_task_that_waits() -> None:
    connection = answered_by_hand()
    taken: list[bytes] = []

    def take(piece: bytes) -> bool:
        taken.append(piece)
        return True

    pumping = asyncio.create_task(connection.pump(taker(take)))
    await asyncio.sleep(0)
    for number in range(3):
        connection.data_received(b"1\r\n%d\r\n" % number)
        assert taken[-1] == b"%d" % number, "bytes are passed on at once, before a turn of the loop"
    await asyncio.sleep(0)
    assert not pumping.done()
    connection.data_received(b"0\r\n\r\n")
    async with asyncio.timeout(5):
        await pumping
    assert (taken, connection.response.is_done) == ([b"0", b"1", b"2"], True)


async def test_a_pump_ends_with_the_first_refused_piece_and_keeps_later_ones() -> None:
    connection = answered_by_hand()
    pumping = asyncio.create_task(connection.pump(taker(lambda piece: piece != b"b")))
    await asyncio.sleep(0)
    for piece in b"abcd":
        connection.data_received(b"1\r\n%c\r\n" % piece)
    async with asyncio.timeout(5):
        await pumping
        assert await connection.read() == b"cd"


async def test_what_a_taker_raises_and_an_interruption_end_the_pump() -> None:
    def fail(piece: bytes) -> bool:
        raise ValueError(piece)

    connection = answered_by_hand()
    pumping = asyncio.create_task(connection.pump(taker(fail)))
    await asyncio.sleep(0)
    connection.data_received(b"1\r\nx\r\n")
    with pytest.raises(ValueError, match="x"):
        await pumping
    connection = answered_by_hand()
    pumping = asyncio.create_task(connection.pump(taker(lambda piece: True)))
    await asyncio.sleep(0)
    connection.interrupt(ConnectionLost("it was silent"))
    with pytest.raises(ConnectionLost, match="silent"):
        await pumping


def taker(take: Callable[[bytes], bool]) -> PieceTaker:
    return cast(PieceTaker, SimpleNamespace(take=take))


def answered_by_hand() -> UpstreamConnection:
    """Return a connection that has received the head of a chunked response."""
    connection = UpstreamConnection(Origin.of("http://h:1"))
    nothing = SimpleNamespace(
        write=lambda data: None, is_closing=lambda: False, abort=lambda: None,
        pause_reading=lambda: None, resume_reading=lambda: None,
    )  # fmt: skip
    connection.connection_made(cast(Any, nothing))
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    return connection
