"""The HTTP/1.1 server with scripted applications: framing, clients that disconnect, and upgrades to other protocols."""

import asyncio
import contextlib
import gc
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context, ContextVar
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from pilotlight.wire.http.connection import UNSENT_BYTES, HttpConnection, HttpLimits, tcp_info
from pilotlight.wire.http.exchange import SLICE_BYTES
from pilotlight.wire.http.listen import bind, loop_factory, url_of
from pilotlight.wire.http.request import MAX_PIPELINED
from pilotlight.wire.http.server import Server, give_back_memory
from tests.asgi import eventually
from tests.edge_router.raw import Wire, status_of, wire
from tests.simulation.virtual_network import Listener, Network
from tests.simulation.virtual_time import Process, virtual_time

pytestmark = pytest.mark.process

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

Send = Callable[[dict[str, Any]], Awaitable[None]]


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class App:
    """An application that reads the request, then sends `messages`; an event among them is a wait. It records its calls."""

    def __init__(self, *messages: Any) -> None:
        self.messages = messages or (start((b"content-length", b"2")), body(b"ok"))
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.errors: list[Exception] = []

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send
    ) -> None:
        self.scopes.append(scope)
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        self.bodies.append(b"".join(parts))
        try:
            for message in self.messages:
                await (message.wait() if isinstance(message, asyncio.Event) else send(message))
        except ValueError as error:
            self.errors.append(error)
            raise


@asynccontextmanager
async def served(
    app: Any, limits: HttpLimits | None = None, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Server]:
    listener = bind(host, 0)
    server = Server(app, limits, **options)
    url = url_of(listener)
    await server.start(listener)
    server.url = url  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        await server.stop(0.2)


@asynccontextmanager
async def client_of(app: Any, **options: Any) -> AsyncIterator[Wire]:
    async with served(app, **options) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        yield client


def parts_of(answer: bytes) -> tuple[list[bytes], bytes]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), rest


async def test_an_answer_has_the_date_of_its_second() -> None:
    now = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    limits = HttpLimits(sweep_s=0.005)
    async with served(app, limits, wall_clock=lambda: now) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        for now in (1_700_000_000, 1_700_000_001):
            expected = b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n"
            await eventually(lambda expected=expected: server.date == expected)
            await client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert expected in await client.hear_until(b"\r\n\r\n")


async def test_connections_whose_check_raises_keep_the_limits_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()
    checked: list[object] = []

    def raising(connection: object) -> bool:
        checked.append(connection)
        raise ValueError("a mistake in a check")

    # Connections are checked in no order: so many that some which wait for a head come after one whose check raises.
    limits = HttpLimits(head_timeout_s=0.1, sweep_s=0.005)
    async with served(App(gate, start(), body(b"")), limits, has_vanished=raising) as server, AsyncExitStack() as stack:
        answered, late = list[Wire](), list[Wire]()
        for clients, said in ((answered, GET), (late, b"GET /")):
            for _ in range(4):
                clients.append(await stack.enter_async_context(wire(server.url)))  # type: ignore[attr-defined]
                await clients[-1].say(said)
            await eventually(lambda: checked)
        await eventually(lambda: server.cut["request_timeout"] == 4)
        assert "a mistake in a check" in caplog.text
        gate.set()
        for client in answered:
            assert (await client.hear_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


def test_a_client_is_not_late_because_the_server_was_stopped() -> None:
    loop, serving = Network(), Process("server", "127.0.0.1")
    listener = cast(socket.socket, Listener(("127.0.0.1", 80)))

    async def cut_at() -> float:
        server = Server(App(), HttpLimits(head_timeout_s=2.0))
        await server.start(listener)
        client, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", 80)
        client.write(b"GET / HTTP/1.1\r\n")
        began = loop.now
        loop.call_later(1.0, loop.suspend, serving, context=Context())
        loop.call_later(60.0, loop.resume, serving, context=Context())
        await eventually(lambda: server.cut["request_timeout"], 100)
        return loop.now - began

    with virtual_time(loop, 0):
        assert loop.run_until_complete(loop.start(serving, cut_at())) >= 62.0


@pytest.mark.parametrize("size", [SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES, 5 * SLICE_BYTES + 7])
@pytest.mark.parametrize("has_length", [True, False])
async def test_a_large_answer_arrives_whole_in_slices(size: int, has_length: bool) -> None:
    whole = os.urandom(size)
    head = start((b"content-length", b"%d" % size)) if has_length else start()
    parts = [body(whole)] if has_length else [body(whole, True), body(b"")]
    async with (
        served(App(head, *parts)) as server,
        aiohttp.ClientSession() as session,
        session.get(server.url) as response,  # type: ignore[attr-defined]
    ):
        assert await response.read() == whole


async def test_a_client_that_does_not_read_a_large_answer_costs_a_buffer_and_not_the_answer() -> None:
    limits = HttpLimits()
    async with served(App(start(), body(b"x" * (8 << 20)))) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await client.say(GET)
        await eventually(lambda: any(each.is_full for each in server.connections))
        (connection,) = server.connections
        assert connection.transport.get_write_buffer_size() <= limits.write_buffer_bytes + SLICE_BYTES + 100


@pytest.mark.skipif(sys.platform != "linux", reason="the struct is Linux's")
@pytest.mark.parametrize("factory", [None, loop_factory()], ids=["asyncio", "uvloop"])
def test_the_kernel_holds_little_for_a_client_that_does_not_read(factory: Any) -> None:
    async def run() -> None:
        app = App(start(), body(b"x" * (16 << 20)))
        async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            await client.say(GET)
            await eventually(lambda: any(each.is_full for each in server.connections))
            (connection,) = server.connections
            unsent = [-1]

            def takes_no_more() -> bool:
                info = tcp_info(connection.transport.get_extra_info("socket"), 148)
                unsent.append(struct.unpack_from("=I", info, 144)[0])  # tcpi_notsent_bytes
                return len({*unsent[-20:]}) == 1 and unsent[-1] > 0

            await eventually(takes_no_more)
            assert unsent[-1] <= 2 * UNSENT_BYTES

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


async def test_unread_bytes_of_all_clients_are_bounded_and_the_longest_unread_is_cut_off() -> None:
    given_back: list[int] = []
    limits = HttpLimits(
        max_unread_bytes=4 * 200_000, sweep_s=0.005, given_back_bytes=1000
    )  # one address may have a quarter: two buffers
    async with served(App(start(), body(b"x" * (8 << 20))), limits, give_back=lambda: given_back.append(1)) as server:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(4):
                client = await stack.enter_async_context(wire(server.url))  # type: ignore[attr-defined]
                await client.say(GET)
                await eventually(lambda number=number: server.cut["unread"] == max(0, number - 1))
                await eventually(lambda: all(each.is_full for each in server.connections))
            unread = [each.transport.get_write_buffer_size() for each in server.connections]
            assert (len(unread), sum(unread) <= 200_000) == (2, True)
        await eventually(lambda: not server.connections)
        await eventually(lambda: given_back)


def test_memory_is_given_back_where_the_library_can() -> None:
    trimmed: list[int] = []
    for library in (SimpleNamespace(malloc_trim=trimmed.append), SimpleNamespace()):
        give_back_memory(library)
    assert trimmed == [0]
    give_back_memory()


async def test_a_streams_first_part_comes_with_its_head_when_it_is_there() -> None:
    gate = asyncio.Event()
    async with client_of(App(start(), body(b"one", True), gate, body(b""))) as client:
        await client.say(GET)
        assert (await client.reader.read(1 << 16)).endswith(b"\r\n\r\n3\r\none\r\n")


@pytest.mark.parametrize(
    ("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)], ids=["HEAD", "204", "304"]
)
async def test_an_answer_without_a_body_gets_none_and_the_connection_continues(method: bytes, status: int) -> None:
    async with client_of(App(start(status=status), body(b"this is not for you", True), body(b"nor this"))) as client:
        for _ in range(2):
            await client.say(GET.replace(b"GET", method))
            assert status_of(await client.hear_until(b"\r\n\r\n")) == status


@pytest.mark.parametrize(
    ("headers", "parts", "length"),
    [
        ((), [body(b"")], None),
        ((), [body(b"", True), body(b"")], None),
        ((), [body(b"one", True), body(b"two")], None),
        ((), [body(b"whole")], b"5"),
        ([(b"content-length", b"7")], [body(b"")], b"7"),
    ],
)
async def test_the_answer_to_a_head_request_names_a_length_only_where_it_is_known(
    headers: list[tuple[bytes, bytes]], parts: list[Any], length: bytes | None
) -> None:
    async with client_of(App(start(*headers), *parts)) as client:
        for _ in range(2):  # on the same connection
            await client.say(GET.replace(b"GET", b"HEAD"))
            lines, _ = parts_of(await client.hear_until(b"\r\n\r\n"))
            lengths = [line.partition(b": ")[2] for line in lines if line.startswith(b"content-length")]
            assert lengths == ([] if length is None else [length])


@pytest.mark.parametrize("length", [b"3", b"30", b"4, 4", b"-1"])
async def test_an_answer_of_another_length_than_it_says_is_not_sent(length: bytes) -> None:
    app = App(start((b"Content-Length", length)), body(b"four"))
    async with client_of(app) as client:
        await client.say(GET)
        answer = await client.hear_until(b"\r\n\r\n")
        assert status_of(answer) == 500
        assert b"content-length: 0" in answer
        assert len(app.errors) == 1


async def test_a_listener_during_writes_to_a_full_client_notices_that_it_leaves() -> None:
    """Applications wait for http.disconnect while they stream to the client."""
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            told.set()

        watching = asyncio.create_task(watch())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await send(start())
                while not told.is_set():
                    await send(body(b"x" * 100_000, True))
                    await asyncio.sleep(0)
        watching.cancel()

    async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(GET)
        await eventually(lambda: any(connection.is_full for connection in server.connections))
        client.writer.transport.abort()
        await asyncio.wait_for(told.wait(), 60)


async def test_a_client_that_closes_its_sending_half_has_left_however_little_it_reads() -> None:
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while True:  # until the connection is full
                    await send(body(b"x" * 100_000, True))
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with client_of(app) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(GET)
        client.writer.write_eof()
        await asyncio.wait_for(told.wait(), 60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it before the end is read")
async def test_a_request_with_a_body_is_not_started_if_its_client_left_before_it_was_read() -> None:
    app, listener = App(), bind("127.0.0.1", 0)
    ask = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"
    for _ in range(3):
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(ask)
    server = Server(app)
    await server.start(listener)
    try:
        async with wire(url_of(listener)) as present:
            await present.say(ask)
            await present.hear_until(b"ok")
            await eventually(lambda: len(server.connections) == 1)
            assert app.bodies == [b"body"]
    finally:
        await server.stop(0.2)


async def test_headers_keep_their_order_and_number_and_lose_case_and_spaces() -> None:
    app = App()
    async with client_of(app) as client:
        await client.say(b"GET /a%20b?c=%20 HTTP/1.1\r\nHost: x\r\nX-Twice: 1\r\nx-other:\t2 \t\r\nx-twice: 3\r\n\r\n")
        await client.hear_until(b"ok")
    (scope,) = app.scopes
    assert scope["headers"] == [(b"host", b"x"), (b"x-twice", b"1"), (b"x-other", b"2"), (b"x-twice", b"3")]
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=%20")
    assert (scope["http_version"], scope["root_path"], scope["scheme"]) == ("1.1", "", "http")


@pytest.mark.parametrize("target", [b"http://", b"http://a:99999/", b"http://h:/x", b"x://", b"http://[::1"])
async def test_an_absolute_target_that_is_no_url_is_refused(target: bytes) -> None:
    app = App()
    async with client_of(app) as client:
        await client.say(b"GET %s HTTP/1.1\r\nhost: h\r\n\r\n" % target)
        answer = await client.hear_until(b"}}")
    assert status_of(answer) == 400
    assert b"is not a URL" in answer
    assert app.scopes == []


async def test_an_absolute_target_is_its_path() -> None:
    app = App()
    async with client_of(app) as client:
        await client.say(b"GET http://other:81/a?b=c HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.hear_until(b"ok")
    assert (app.scopes[0]["path"], app.scopes[0]["query_string"]) == ("/a", b"b=c")


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("wish", [b"mqtt", b"h2c", b"websocket"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_wish_that_is_not_granted_is_passed_over_and_its_body_is_read(wish: bytes, is_whole: bool) -> None:
    """Java's HTTP client requests h2c on every plain connection, and sends the body at once."""
    app = App()
    head = b"POST /j HTTP/1.1\r\nhost: x\r\n" + UPGRADE % wish + b"content-length: 6\r\n\r\n"
    async with client_of(app) as client:
        for _ in range(2):
            await client.say(*([head + b"onetwo"] if is_whole else [head[:40], head[40:], b"one", b"two"]))
            assert status_of(await client.hear_until(b"ok")) == 200
    assert app.bodies == [b"onetwo", b"onetwo"]
    assert b"upgrade" not in dict(app.scopes[0]["headers"])


async def test_many_wishes_at_once_are_as_many_requests() -> None:
    app = App()
    async with client_of(app) as client:
        await client.say((b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: mqtt\r\n\r\n") * 60)
        for _ in range(60):
            assert status_of(await client.hear_until(b"ok")) == 200
        await client.say((b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: mqtt\r\n\r\n") * 2000)
        await client.hear_all()  # until the connection is closed
        assert len(app.scopes) <= 60 + MAX_PIPELINED + 1


async def test_a_stop_waits_until_requests_that_it_cuts_have_noticed() -> None:
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append("told")

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    for each, word in ((app, "told"), (deaf, "cancelled")):
        async with served(each) as server, wire(server.url) as client:  # type: ignore[attr-defined]
            await client.say(GET)
            await eventually(lambda: any(connection.task for connection in server.connections))
            await server.stop(0.2)
            assert ended[-1:] == [word]


@pytest.mark.parametrize("evil", [b"1\r\nset-cookie: a=b", b"1\r\n\r\nHTTP/1.1 200 OK", b"1\n2", b"1\r2"])
@pytest.mark.parametrize("own", [(), ((b"content-length", b"2"),)])
async def test_a_header_that_holds_a_line_end_is_not_sent(evil: bytes, own: tuple[tuple[bytes, bytes], ...]) -> None:
    for pair in ((b"x", evil), (b"x-" + evil, b"1")):
        app = App(start(pair, *own), body(b"ok"))
        async with client_of(app) as client:
            await client.say(GET)
            head, _ = parts_of(await client.hear_until(b"\r\n\r\n"))
            assert head[0] == b"HTTP/1.1 500 Internal Server Error"
            assert not any(line.startswith((b"x", b"set-cookie")) for line in head)
        assert len(app.errors) == 1


async def test_a_pipelined_request_does_not_see_variables_of_the_one_before() -> None:
    variable, seen = ContextVar("variable", default=0), []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        seen.append(variable.get())
        variable.set(1)
        await send(start((b"content-length", b"2")))
        await send(body(b"ok"))

    async with served(app) as server, wire(server.url) as client:  # type: ignore[attr-defined]
        await client.say(3 * GET)
        for _ in range(3):
            await client.hear_until(b"ok")
    assert seen == [0, 0, 0]


@pytest.mark.parametrize("leaves", ["behind its answer", "amid its answer", "before its body ends"])
async def test_a_closed_connection_is_forgotten_without_a_garbage_collection(leaves: str) -> None:
    amid = asyncio.Event()
    app = App(start(), body(b"part", more=True), amid, body(b"rest")) if leaves == "amid its answer" else App()
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" if leaves == "before its body ends" else GET
    async with served(app) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                async with wire(server.url) as client:  # type: ignore[attr-defined]
                    await client.say(request)
                    if leaves != "before its body ends":
                        await client.hear_until(b"ok" if leaves == "behind its answer" else b"part")
                    else:
                        await eventually(lambda: len(server.connections) == 1)
            amid.set()
            await eventually(lambda: not server.connections)
            await eventually(lambda: num_alive(HttpConnection) <= 1)  # a frame of the last one may be alive
        finally:
            gc.enable()


def num_alive(kind: type) -> int:
    return sum(isinstance(each, kind) for each in gc.get_objects())
