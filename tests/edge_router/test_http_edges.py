"""The router's HTTP server with clients that are slow, greedy, ambiguous or gone: each one is limited, without effect on others."""

import asyncio
import io
import socket
import threading
from typing import Any

import aiohttp
import pytest

from pilotlight.edge_router.requests.request import AT_ONCE_BYTES, RequestParser
from pilotlight.wire.http.client import Origin
from tests.edge_router.fakes import DONE, FakeSite, answer, begin, event, hang, raw_stream, router, sites, stream_of
from tests.edge_router.raw import post, status_of, wire

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"ember","stream":true,"messages":[]}'


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(20)) + b"\r\n",
        b"GET /" + b"a" * 3000,
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 3000,
    ],
    ids=["a long header", "many headers", "a path without end", "a header without end"],
)
async def test_a_head_beyond_its_limits_is_refused_and_the_connection_closed(head: bytes) -> None:
    door = {"max_head_kib": 2, "max_headers": 16}
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running, wire(running.url) as client:
        await client.say(head)
        heard = await client.hear_all()
        assert status_of(heard) == 431
        assert b'"headers_too_large"' in heard
        assert not fakes[0].seen


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: -4\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/x HTTP/1.1\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\nx\0y: 1\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\nx: a\r\n folded\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
    ],
    ids=[
        "two framings", "two lengths", "a negative length", "a chunk of no size", "no host", "two hosts", "a NUL in a name",
        "a folded line", "a tunnel", "an upgrade", "TLS to a plain port", "nonsense",
    ],
)  # fmt: skip
async def test_an_ambiguous_request_is_refused_before_it_has_an_effect(request_: bytes) -> None:
    async with sites("ams1") as fakes, router(fakes) as running, wire(running.url) as client:
        await client.say(request_)
        heard = await client.hear_all()
        assert status_of(heard) == 400
        assert b'"invalid_request"' in heard
        assert not fakes[0].seen


@pytest.mark.parametrize("started", [b"", b"P", b"POST /v1/x HTTP/1.1\r\nho"])
async def test_a_head_that_dribbles_is_not_waited_for(started: bytes) -> None:
    door = {"head_timeout_s": 0.3}
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running, wire(running.url) as client:
        await client.say(started)
        heard = await client.hear_all()
        assert not heard if not started else status_of(heard) == 408
        assert not running.server.connections or started  # the server closes a connection that sent nothing


async def test_a_body_that_dribbles_is_not_waited_for_however_steadily_it_comes() -> None:
    door = {"body_timeout_s": 0.4}
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running, wire(running.url) as client:
        await client.say(post(CHAT, b"", "x: y").replace(b"content-length: 0", b"content-length: 1000"))

        async def dribble() -> None:
            while True:
                await client.say(b" ")
                await asyncio.sleep(0.02)

        dribbling = asyncio.create_task(dribble())
        heard = await client.hear_all()
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)
        assert status_of(heard) == 408
        assert b'"request_timeout"' in heard
        assert not fakes[0].seen


async def test_a_client_that_never_reads_is_cut_off_and_its_site_released() -> None:
    async def endless(site: FakeSite, request: object) -> object:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 60_000 + b"\n\n")

    door = {"stall_timeout_s": 0.5}
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running:
        fakes[0].behave = endless
        async with wire(running.url) as client:
            raw: socket.socket = client.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.say(post(CHAT, STREAM))
            async with asyncio.timeout(60):
                await running.until(lambda: running.server.cut["unread"] == 1)
                await running.until(lambda: fakes[0].active == 0)


async def test_idle_and_stuck_connections_do_not_keep_others_waiting() -> None:
    """The test has a few hundred connections; the soak and overhead scenarios have thousands.

    No time limit ends a stuck connection, however slow the machine is.
    """
    patient = {"probe_interval_s": 60.0, "connect_timeout_s": 60.0, "first_byte_timeout_s": 120.0}
    async with sites("ams1") as fakes, router(fakes, **patient) as running:
        fakes[0].behave = hang
        idle = [await asyncio.open_connection(*running.url.removeprefix("http://").split(":")) for _ in range(200)]
        for _, writer in idle[:100]:
            writer.write(post(CHAT, STREAM))
        try:
            async with asyncio.timeout(60):
                await running.until(lambda: fakes[0].active == 100)
            fakes[0].behave = stream_of(2)
            async with asyncio.timeout(30), running.chat() as response:
                assert (await response.read()).endswith(DONE)
        finally:
            for _, writer in idle:
                writer.transport.abort()
        async with asyncio.timeout(60):
            await running.until(lambda: fakes[0].active == 0)


async def test_a_foreign_host_is_refused_however_often_it_comes() -> None:
    async with sites("ams1") as fakes, router(fakes) as running, wire(running.url) as client:
        for _ in range(20):
            await client.say(b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n")
            assert status_of(await client.hear_until(b"}}")) == 421


async def test_connections_of_one_address_are_limited() -> None:
    door = {"max_connections_per_client": 3}
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running:
        await running.http.close()  # its connections would count, too
        async with asyncio.timeout(60):
            await running.until(lambda: not running.server.connections)
        async with wire(running.url), wire(running.url), wire(running.url), wire(running.url) as fourth:
            heard = await fourth.hear_all()
            assert status_of(heard) == 429
            assert b"retry-after: 1" in heard


async def test_small_events_leave_at_once_on_both_sides() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        async with running.chat() as response:
            assert await response.content.readany() == event(0)
            fakes[0].go_on.set()
            await response.read()
            await running.until(lambda: running.counted("pilotlight_router_open_requests") == 0)
            upstream = running.proxy.upstream.pool.idle(Origin.of(fakes[0].url))
            assert upstream is not None
            transports = [connection.transport for connection in running.server.connections]
            for transport in (*transports, upstream.transport):
                assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert transports
            running.proxy.upstream.pool.put_back(upstream)


async def test_http_2_is_served_on_the_same_port_where_the_file_says_so() -> None:
    h2 = pytest.importorskip("h2.connection")
    events = pytest.importorskip("h2.events")
    async with (
        sites("ams1") as fakes,
        router(fakes, tables={"door": {"http2": True}}) as running,
        wire(running.url) as client,
    ):
        fakes[0].behave = answer(200, {"number": 7})
        protocol = h2.H2Connection()
        protocol.initiate_connection()
        body = b'{"model":"ember"}'
        head = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "localhost"),
            (":path", CHAT),
            ("content-length", str(len(body))),
        ]
        protocol.send_headers(1, head)
        protocol.send_data(1, body, end_stream=True)
        await client.say(protocol.data_to_send())
        heard = b""
        while b"7" not in heard:
            for what in protocol.receive_data(await client.reader.read(1 << 16)):
                if isinstance(what, events.DataReceived):
                    heard += what.data
            await client.say(protocol.data_to_send())
        assert heard == b'{"number": 7}'


HUGE = b'{"model":"ember","messages":['


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, HUGE + b"0," * (4_000_000) + b"0]}", 400),
        ("/debug/route", HUGE + b"0," * (4_000_000) + b"0]}", 400),
        ("/v1/models", b"{}", 405),
        ("/ai/v1/models", HUGE + b"0," * (4_000_000) + b"0]}", 405),
    ],
)
async def test_a_body_that_would_take_seconds_to_look_at_is_refused_by_its_shape(
    path: str, body: bytes, status: int
) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.post(running.url + path, data=io.BytesIO(body)) as response:
            assert response.status == status
        assert fakes[0].bodies == []


async def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    parse = RequestParser.parse

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(RequestParser, "parse", noting)
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {})
        for size in (10, AT_ONCE_BYTES):
            message = {"role": "user", "content": "x" * size}
            for path in (CHAT, "/debug/route"):
                async with running.http.post(
                    running.url + path, json={"model": "ember", "messages": [message]}
                ) as response:
                    assert response.status == 200
    large = [thread for thread in threads if thread is not threading.main_thread()]
    assert len(large) == 2


async def test_bodies_in_flight_have_one_budget_and_it_is_whole_again_when_they_are_answered_or_gone() -> None:
    door = {"max_bodies_mib": 1}
    half = post(CHAT, b'{"model":"ember"}' + b" " * (600 << 10))
    async with sites("ams1") as fakes, router(fakes, tables={"door": door}) as running:
        fakes[0].behave = answer(200, {})
        async with wire(running.url) as slow, wire(running.url) as late:
            await slow.say(half[:-1])
            await running.until(lambda: running.counted("pilotlight_router_body_bytes") > 500 << 10)
            await late.say(half)
            heard = await late.hear_all()
            assert status_of(heard) == 503
            assert b"retry-after: 1" in heard
        await running.until(lambda: running.counted("pilotlight_router_body_bytes") == 0)
        for _ in range(3):
            async with wire(running.url) as client:
                await client.say(half)
                assert status_of(await client.hear_until(b"\r\n\r\n")) == 200
        await running.until(lambda: running.counted("pilotlight_router_body_bytes") == 0)


@pytest.mark.parametrize("size", [10, 3 << 20])
async def test_a_body_of_any_kind_at_an_unknown_path_is_404_and_unread(size: int) -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        form = aiohttp.FormData({"model": "ember"})
        form.add_field("file", io.BytesIO(b"\xff" * size), filename="speech.wav")
        async with running.http.post(running.url + "/v1/audio/transcriptions", data=form) as response:
            told = await response.json()
            assert (response.status, told["error"]["code"]) == (404, "not_found")
        assert not fakes[0].seen


async def test_a_slash_at_the_end_of_an_apis_path_changes_nothing() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, {"ok": True})
        for path in ("/v1/chat/completions", "/client/v4/accounts/a/ai/run/@cf/m"):
            async with running.http.post(f"{running.url}{path}/", json={"model": "m", "messages": []}) as response:
                assert response.status == 200, await response.text()
            assert fakes[0].seen[-1].path == path
        async with running.http.head(running.url + "/") as response:
            assert response.status == 200
