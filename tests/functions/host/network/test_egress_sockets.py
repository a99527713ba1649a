"""WebSockets that functions open to other servers, under the egress policy."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import WSMessage, WSMsgType, web

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import Message, MessageDecoder, SocketClose, encode
from pilotlight.functions.host.network.egress_sockets import opened
from tests.functions.conftest import ServedMaker

OUTWARD = """
from js import WebSocketPair
from workers import Response, WorkerEntrypoint, fetch

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        address = request.headers["x-to"]
        try:
            answer = await fetch(address, headers={"Upgrade": "websocket", "x-mine": "yes", "sec-websocket-protocol": "a, b"})
        except TypeError as error:
            return Response(str(error), status=502)
        except Exception as error:
            return Response(f"{error.code}: {error}", status=502)
        if answer.status != 101:
            return Response(f"refused with {answer.status}")
        socket = answer.web_socket
        socket.accept()
        socket.send("hello")
        said = [socket.protocol]
        async for message in socket:
            said.append(str(message))
            if message == "hello":
                await socket.send(b"bytes")
            elif len(said) == 3:
                socket.send("end")
        return Response.json([*said, socket.close_code, socket.close_reason])
"""


@asynccontextmanager
async def far_side() -> AsyncIterator[tuple[str, list[web.Request]]]:
    seen: list[web.Request] = []

    async def echo(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        if request.path == "/no":
            return web.Response(status=418)
        if request.path == "/elsewhere":
            return web.Response(status=int(request.query["status"]), headers={"location": request.query["to"]})
        socket = web.WebSocketResponse(protocols=("b",))
        await socket.prepare(request)
        async for message in socket:
            if message.data == "end":
                await socket.close(code=4005, message=b"as told")
            elif isinstance(message.data, str):
                await socket.send_str(message.data)
            else:
                await socket.send_bytes(message.data)
        return socket

    app = web.Application()
    app.router.add_get("/{path:.*}", echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


async def test_a_function_opens_sockets_to_the_world_through_the_egress_policy(make_served: ServedMaker) -> None:
    async with far_side() as (place, seen), make_served(tier=1, egress_allow=["127.0.0.1"]) as served:
        served.add(OUTWARD)
        for url in (f"http://{place}/ws?a=b", f"ws://{place}/ws?a=b"):
            said = json.loads(await served.get("/", headers=[("x-to", url)]))
            assert said == ["b", "hello", "b'bytes'", 4005, "as told"]
        assert seen[0].path_qs == "/ws?a=b"
        assert seen[0].headers["x-mine"] == "yes"
        assert await served.get("/", headers=[("x-to", f"http://{place}/no")]) == b"refused with 418"
        assert b"failed" in await served.get("/", headers=[("x-to", "http://127.0.0.1:9/")])


async def test_the_egress_policy_holds_for_sockets(make_served: ServedMaker) -> None:
    async with far_side() as (place, seen), make_served(tier=1) as served:
        served.add(OUTWARD)
        for url in (f"http://{place}/", f"ws://localhost:{place.rpartition(':')[2]}/", "ftp://example.com/"):
            answer = await served.ask("/", headers=[("x-to", url)])
            assert answer.status == 502
            assert b"egress_denied" in answer.body or b"bad_url" in answer.body
        assert seen == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_handshake_is_not_redirected_past_the_policy(make_served: ServedMaker, status: int) -> None:
    async with far_side() as (open_place, asked), far_side() as (closed_place, canary):
        async with make_served(tier=1, egress_allow=[open_place]) as served:
            served.add(OUTWARD)
            for to in (f"http://{closed_place}/", f"http://localhost:{closed_place.rpartition(':')[2]}/", "/ws"):
                url = f"ws://{open_place}/elsewhere?status={status}&to={to}"
                assert await served.get("/", headers=[("x-to", url)]) == b"refused with %d" % status
        assert [request.path for request in asked] == ["/elsewhere"] * 3
        assert canary == []


CONNECTING = """
import asyncio
import js
from pyodide.ffi import create_proxy
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        over, told = asyncio.Event(), []
        socket = js.WebSocket.new(request.headers["x-to"], ["b"])
        def on_open(event):
            told.append([event.type, socket.protocol])
            socket.send("hello")
        async def on_message(event):
            told.append([event.type, event.data])
            socket.send("end")
        def on_error(event):
            told.append([event.type, event.message])
        def on_close(event):
            told.append([event.type, event.code, event.reason])
            over.set()
        for name, handler in (("open", on_open), ("message", on_message), ("error", on_error), ("close", on_close)):
            socket.addEventListener(name, create_proxy(handler))
        async with asyncio.timeout(60):
            await over.wait()
        return Response.json(told)
"""


async def test_a_websocket_made_from_its_address_reports_its_fate_by_events(make_served: ServedMaker) -> None:
    async with far_side() as (place, _), make_served(tier=1, egress_allow=["127.0.0.1"]) as served:
        served.add(CONNECTING)
        told = json.loads(await served.get(headers=[("x-to", f"ws://{place}/")]))
        assert told == [["open", "b"], ["message", "hello"], ["close", 4005, "as told"]]
        refused = json.loads(await served.get(headers=[("x-to", f"ws://{place}/no")]))
        assert [each[:2] for each in refused] == [
            ["error", f"ws://{place}/no answered 418 instead of switching"],
            ["close", 1006],
        ]
        denied = json.loads(await served.get(headers=[("x-to", "ws://10.0.0.1/")]))
        assert [each[0] for each in denied] == ["error", "close"]
        assert "not allowed" in denied[0][1]


class FarSocket:
    """The server's side of a function's WebSocket, with aiohttp's interface."""

    protocol = "b"
    close_code: int | None = None

    def __init__(self) -> None:
        self.said: asyncio.Queue[WSMessage] = asyncio.Queue()
        self.heard: list[Any] = []
        self.closed: list[tuple[int, bytes]] = []
        self.asked: dict[str, Any] = {}

    async def ws_connect(self, url: str, **options: Any) -> "FarSocket":
        self.asked = {"url": url, **options}
        return self

    async def receive(self) -> WSMessage:
        return await self.said.get()

    async def send_str(self, text: str) -> None:
        self.heard.append(text)

    send_bytes = send_str

    async def close(self, code: int = 1000, message: bytes = b"") -> None:
        self.closed.append((code, message))
        self.said.put_nowait(WSMessage(WSMsgType.CLOSE, code, message.decode()))


async def messages_of(*messages: Message | Exception) -> AsyncIterator[bytes]:
    for message in messages:
        if isinstance(message, Exception):
            raise message
        yield encode(message)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("last", "code", "reason"),
    [
        (SocketClose(4001, "enough"), 4001, b"enough"),
        (SocketClose(1005), 1000, b""),
        (SocketClose(1006), 1000, b""),
        (Failure("its isolate is gone"), 1001, b""),
    ],
)
async def test_the_far_side_hears_all_that_a_function_says_and_how_it_ended(
    last: Message | Exception, code: int, reason: bytes
) -> None:
    far = FarSocket()
    headers = [("Sec-WebSocket-Protocol", "a, b,"), ("sec-websocket-key", "x"), ("x-mine", "yes")]
    reply = await opened(cast(Any, far), "http://far/", headers, messages_of("hello", b"bytes", last))
    assert far.asked["url"] == "http://far/"
    assert far.asked["headers"] == [("x-mine", "yes")]
    assert far.asked["protocols"] == ["a", "b"]
    assert reply.value == {
        "status": 101, "headers": [("sec-websocket-protocol", "b")], "web_socket": True, "url": "http://far/",
    }  # fmt: skip
    assert reply.body is not None
    async with asyncio.timeout(60):
        heard = [message async for chunk in reply.body for message in MessageDecoder(100).feed(chunk)]
    assert (far.heard, far.closed[0]) == (["hello", b"bytes"], (code, reason))
    assert heard == [SocketClose(code, reason.decode())]


@pytest.mark.parametrize(("close_code", "told"), [(None, 1006), (1011, 1011)])
async def test_a_function_hears_how_a_connection_ended_that_was_not_closed(close_code: int | None, told: int) -> None:
    far = FarSocket()
    far.close_code = close_code
    reply = await opened(cast(Any, far), "http://far/", [], messages_of(), close_s=0.01)
    assert reply.body is not None
    for kind, data in ((WSMsgType.TEXT, "a"), (WSMsgType.BINARY, b"b"), (WSMsgType.CLOSED, None)):
        far.said.put_nowait(WSMessage(kind, data, None))
    found = [message async for chunk in reply.body for message in MessageDecoder(100).feed(chunk)]
    assert found == ["a", b"b", SocketClose(told)]
    assert far.closed == [(1001, b"")]
