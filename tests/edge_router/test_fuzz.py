"""Random bytes from sites and clients: none of them stops the router, and each failure has its error code."""

import asyncio
import json
import logging
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.edge_router.forwarding.relay import DeliveryLog, Forward, StreamBroken, StreamRelay
from pilotlight.wire.errors import ERRORS
from pilotlight.wire.hop.continuation import RESUME_POINTS
from pilotlight.wire.sse import EventDecoder
from tests.edge_router.fakes import (
    DONE,
    FakeSite,
    begin,
    event,
    marked_event,
    reset_connection,
    routed_sites,
    router,
    sites,
)
from tests.edge_router.raw import status_of, wire

pytestmark = pytest.mark.process

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([
            b"\n", b"\r", b"\r\n", b"\n\n", b"data: ", b"data:", b"id: 7\n", b"event: x\n", b": c\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\0",
            DONE, event(1), marked_event(0), marked_event(1), b":pl [", b":pl [0,[1],null,0]\n", b":pl draining\n\n",
            b'data: {"error": {"code": "internal_error"}}\n\n', b":pl [0,[1e99],null,0]\n\n", b":pl [9999999,[],null,0]\ndata: x\n\n",
            b"data: " + b"y" * 70_000,
        ]),
    ),
    max_size=12,
)  # fmt: skip
CUTS = st.lists(st.integers(0, 400), max_size=8)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(min(i, len(data)) for i in at)})
    return [data[a:b] for a, b in pairwise(bounds)]


@settings(FEW, max_examples=200)
@given(PIECES, CUTS)
def test_a_relay_of_anything_sends_a_prefix_of_it_and_names_the_fault(pieces: list[bytes], at: list[int]) -> None:
    told, logs = [], []
    for parts in ([b"".join(pieces)], cut(b"".join(pieces), at)):
        log, said = DeliveryLog(), b""
        relay = StreamRelay(log, is_resumable=True)
        for step in (step for part in parts for step in relay.feed(part)):
            if isinstance(step, Forward):
                said += step.data
            elif isinstance(step, StreamBroken):
                assert step.detail
                break
        told.append(said)
        logs.append(log)
        assert not any(event.raw.startswith(b":pl [") for event in EventDecoder().feed(said))
        log.delivery()
    assert told[0] == told[1]
    assert logs[0].num_tokens == logs[1].num_tokens


@pytest.mark.parametrize("has_marks", [True, False])
async def test_a_site_that_sends_anything_in_any_pieces_is_survived(
    has_marks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    caplog.set_level(logging.ERROR)
    script: list[bytes] = []
    end = "clean"

    async def anything(site: FakeSite, request: web.Request) -> web.StreamResponse:
        response = await begin(
            request, {"content-type": "text/event-stream", **({RESUME_POINTS: "1"} if has_marks else {})}
        )
        for part in script:
            if part:
                await response.write(part)
                await asyncio.sleep(0)
        if end == "reset":
            reset_connection(request)
        elif end == "half-close" and request.transport is not None:
            request.transport.write_eof()
        return response

    examples: list[tuple[list[bytes], str]] = []

    @FEW
    @given(PIECES, CUTS, st.sampled_from(["clean", "reset", "half-close"]))
    def collect(pieces: list[bytes], at: list[int], how: str) -> None:
        examples.append((cut(b"".join(pieces), at), how))

    collect()
    async with routed_sites("ams1", continue_within_s=0, idle_timeout_s=0.5, first_byte_timeout_s=0.5) as (
        fakes,
        running,
    ):
        fakes[0].behave = anything
        for parts, how in examples:
            script, end = parts, how
            async with asyncio.timeout(60), running.chat() as response:
                body = await response.read()
                assert body
                assert response.status in (200, 502, 503, 504)
                if response.status != 200:
                    assert json.loads(body)["error"]["code"] in ERRORS
            await running.until(lambda: running.proxy.selector.backends["ams1"].state == "healthy")
    assert not [record for record in caplog.records if record.name.startswith(("edge_router", "wire"))]


RAW_ANSWERS = [
    b"", b"\r\n", b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 abc OK\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"SSH-2.0-x\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcdefgh", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab", b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, b"HTTP/1.1 200 OK\r\nx\xff\xfe: \x80\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: \xff\xfe\x00\n\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 5\r\n\r\ndata:",
    b"HTTP/1.1 200 OK\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_site_that_does_not_speak_http_is_named_and_left(slowly: bool) -> None:
    """The answer may come byte by byte.

    A complete answer is forwarded; anything else becomes an error with a code, or a stream with an error event.
    """
    raw = b""
    serving: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(writer)
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in [raw[i : i + 1] for i in range(len(raw))] if slowly and len(raw) < 200 else [raw]:
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            serving.discard(writer)

    liar = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with (
        liar,
        sites("ams1") as fakes,
        router(fakes, probe_interval_s=300, continue_within_s=0, first_byte_timeout_s=0.5) as running,
    ):
        backend = running.proxy.selector.backends["ams1"]
        backend.url = f"http://127.0.0.1:{liar.sockets[0].getsockname()[1]}"
        for raw in RAW_ANSWERS:  # noqa: B007 (`serve` reads it)
            asked = running.http.post(
                running.url + "/v1/chat/completions", json={"model": "ember"}, allow_redirects=False
            )
            async with asyncio.timeout(60), asked as response:
                body = await response.read()
                if response.status in (502, 503, 504):
                    assert json.loads(body)["error"]["code"] in ERRORS
                elif response.status == 200 and response.content_type == "text/event-stream":
                    assert b'"upstream_lost"' in body
                else:
                    assert response.status in (200, 204, 302)
            backend.probed.set_state("healthy", "")
        running.proxy.upstream.pool.sweep()
        await running.until(lambda: not serving)


REQUEST_PIECES = [
    b"GET / HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n", b"host: localhost\r\n", b"\r\n", b"content-length: 5\r\n", b"0\r\n\r\n",
    b"transfer-encoding: chunked\r\n", b"5\r\nabcde\r\n", b'{"model":"ember"}', b"expect: 100-continue\r\n", b"connection: close\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"x: " + b"a" * 9000 + b"\r\n", b"\0", b"\xff\xff",
]  # fmt: skip


@settings(FEW, max_examples=25)
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(REQUEST_PIECES)), max_size=10))
def test_a_client_that_says_anything_gets_an_answer_or_an_end(parts: list[bytes]) -> None:
    door = {"head_timeout_s": 0.2, "body_timeout_s": 0.2}

    async def scenario() -> None:
        async with sites("ams1") as fakes, router(fakes, probe_interval_s=300, tables={"door": door}) as running:
            async with asyncio.timeout(60), wire(running.url) as client:
                try:
                    await client.say(*(part for part in parts if part))
                    client.writer.write_eof()
                except (ConnectionError, RuntimeError):
                    pass  # the server closed the connection before all was sent
                heard = await client.hear_all()
                if heard.startswith(b"HTTP/1.1 "):
                    assert 100 <= status_of(heard) < 600
            async with running.http.get(running.url + "/livez") as alive:
                assert alive.status == 200

    asyncio.run(scenario())
