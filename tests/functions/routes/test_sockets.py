"""WebSockets at /fn/ of a whole site, with a real client: messages, refusals, limits, and all ways to close."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from pilotlight.functions.manifest import load_manifest
from tests.asgi import eventually
from tests.functions.routes.test_invocations import function_in
from tests.handshakes import handshake_of
from tests.runtime.conftest import Site, SiteMaker

pytestmark = pytest.mark.process

SOURCE = """
import asyncio
from js import WebSocketPair
from pyodide.ffi import create_proxy
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.split("?")[0].rpartition("/")[2]
        if path == "plain":
            return Response("no socket here", status=418)
        if path == "boom":
            raise ValueError("it went wrong")
        if request.headers.get("Upgrade") != "websocket":
            return Response("Expected Upgrade: websocket", status=426)
        client, server = WebSocketPair.new().object_values()
        server.accept()
        return await getattr(self, path)(request, client, server)

    async def echo(self, request, client, server):
        async def on_message(event):
            if event.data == "close":
                server.close(4001, "as you wish")
            elif event.data == "exit":
                import os
                os._exit(3)
            else:
                server.send(event.data if isinstance(event.data, str) else event.data.to_bytes())
        def on_close(event):
            print("closed", event.code, event.reason, event.wasClean, flush=True)
        server.addEventListener("message", create_proxy(on_message))
        server.addEventListener("close", create_proxy(on_close))
        protocols = request.headers.get("sec-websocket-protocol")
        headers = {"x-seen": "yes", **({"sec-websocket-protocol": protocols.split(",")[-1].strip()} if protocols else {})}
        return Response(None, status=101, web_socket=client, headers=headers)

    async def loop(self, request, client, server):
        async def session():
            count = 0
            async for message in server:
                count += 1
                await server.send(f"{count}: {message}")
            print("loop over", server.close_code, server.close_reason, flush=True)
        self.ctx.waitUntil(session())
        return Response(None, status=101, web_socket=client)

    async def deaf(self, request, client, server):
        return Response(None, status=101, web_socket=client)

    async def flood(self, request, client, server):
        async def session():
            for i in range(100_000):
                await server.send(b"f" * 10_000)
                self.env.sent = i
                print(i, flush=True) if i % 100 == 0 else None
        self.ctx.waitUntil(session())
        return Response(None, status=101, web_socket=client)

    async def wrong(self, request, client, server):
        return Response(None, status=101)

    async def both(self, request, client, server):
        return Response(None, status=101, web_socket=server)
"""


@pytest.fixture
async def server(make_server: SiteMaker, tmp_path: Path) -> AsyncIterator[Site]:
    async with make_server(functions=table(tmp_path)) as made:
        yield made


def table(tmp_path: Path, **more: Any) -> dict[str, Any]:
    folder = function_in(tmp_path / "f", SOURCE)
    return {"serve": [{"name": "f", "path": str(folder)}], "state_dir": str(tmp_path / "state"), **more}


def printed(site: Site) -> list[str]:
    return [
        line
        for isolate in site.app.functions.served.functions.pools["f"].isolates.living
        for line in isolate.process.log.lines
    ]


async def closed(socket: ClientWebSocketResponse) -> tuple[int | None, str]:
    """Return the code and reason of the site's close."""
    message = await asyncio.wait_for(socket.receive(), 60)
    assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING), message
    return socket.close_code, message.extra or ""


async def test_a_function_echoes_texts_and_bytes(server: Site) -> None:
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.ws_connect("/fn/f/echo", protocols=("a", "b")) as socket,
    ):
        assert socket.protocol == "b"
        assert handshake_of(socket).headers["x-seen"] == "yes"
        assert handshake_of(socket).headers["x-pilotlight-site"] == "ams1"
        for text in ("hello", "", "ünï" * 1000, "x" * 1_000_000):
            await socket.send_str(text)
            assert await socket.receive_str(timeout=60) == text
        for data in (b"", b"\0\xff", os.urandom(900_000)):
            await socket.send_bytes(data)
            assert await socket.receive_bytes(timeout=60) == data
        await socket.close(code=4321, message=b"enough")
    await eventually(lambda: "closed 4321 enough True" in printed(server))
    await eventually(lambda: server.app.site.admission.attached == 0)


async def test_messages_can_be_iterated(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client, client.ws_connect("/fn/f/loop") as socket:
        for text in ("a", "b"):
            await socket.send_str(text)
        assert [await socket.receive_str(timeout=60) for _ in range(2)] == ["1: a", "2: b"]
        await socket.close()
    await eventually(lambda: "loop over 1000 " in printed(server))


async def test_a_client_that_speaks_before_its_handshake_is_answered_is_heard_and_leaves_nothing_behind(
    server: Site,
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = b"GET /fn/f/echo HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    head += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b"\x81\x82\0\0\0\0hi")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).startswith(b"HTTP/1.1 101")
        assert await asyncio.wait_for(reader.readexactly(4), 60) == b"\x81\x02hi"
        writer.transport.abort()
    admission, pool = server.app.site.admission, server.app.functions.served.functions.pools["f"]
    await eventually(lambda: admission.inflight == admission.attached == pool.isolates.sockets == 0)


async def test_of_a_refused_handshake_nothing_waits_on(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client:
        with pytest.raises(WSServerHandshakeError):
            await client.ws_connect("/fn/f/plain")
        await eventually(lambda: not [task for task in asyncio.all_tasks() if "_awaited" in str(task.get_coro())])


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("plain", 418, "no socket here"),
        ("boom", 500, "function_failed"),
        ("wrong", 500, "function_failed"),
        ("both", 500, "function_failed"),
    ],
)
async def test_a_function_that_does_not_open_the_socket_answers_as_http(
    server: Site, path: str, status: int, word: str
) -> None:
    headers = {
        "upgrade": "websocket",
        "connection": "upgrade",
        "sec-websocket-version": "13",
        "sec-websocket-key": "x" * 22 + "==",
    }
    async with aiohttp.ClientSession(server.url) as client:
        async with client.get(f"/fn/f/{path}", headers=headers) as answer:
            assert answer.status == status
            assert word in await answer.text()
            assert "x-request-id" in answer.headers
        with pytest.raises(WSServerHandshakeError) as failed:
            await client.ws_connect("/fn/nobody/")
        assert failed.value.status == 404


async def test_a_plain_request_to_a_socket_is_refused_by_name(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client, client.get("/fn/f/echo") as answer:
        assert answer.status == 426


async def test_a_killed_isolate_closes_its_sockets_with_1011(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client, client.ws_connect("/fn/f/echo") as socket:
        await socket.send_str("x")
        await socket.receive_str(timeout=60)
        pool = server.app.functions.served.functions.pools["f"]
        os.kill(pool.isolates.living[0].process.child.pid, signal.SIGKILL)
        assert await closed(socket) == (1011, "the function failed")
        async with client.ws_connect("/fn/f/echo") as another:
            await another.send_str("again")
            assert await another.receive_str(timeout=60) == "again"


async def test_a_replaced_function_closes_its_sockets_with_1012(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client, client.ws_connect("/fn/f/echo") as socket:
        functions = server.app.functions.served
        functions.add(load_manifest(functions.manifests["f"][0].directory))
        assert await closed(socket) == (1012, "the function is being replaced")


async def test_a_replaced_function_closes_its_sockets_though_its_other_work_continues(server: Site) -> None:
    functions = server.app.functions.served
    with functions.functions.version("f").held():
        async with aiohttp.ClientSession(server.url) as client, client.ws_connect("/fn/f/echo") as socket:
            functions.add(load_manifest(functions.manifests["f"][0].directory))
            assert await closed(socket) == (1012, "the function is being replaced")


async def test_an_open_socket_is_published_and_is_no_request_in_progress(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client, client.ws_connect("/fn/f/echo") as socket:
        await socket.send_str("here")
        assert await socket.receive_str(timeout=60) == "here"
        async with client.get("/status") as answer:
            (published,) = (await answer.json())["functions"]["functions"]
        assert (published["sockets"], published["inflight"]) == (1, 0)


async def test_a_client_that_does_not_read_holds_the_function_up(server: Site) -> None:
    async with aiohttp.ClientSession(server.url) as client:
        socket = await client.ws_connect("/fn/f/flood")
        transport = handshake_of(socket).connection.transport
        transport.pause_reading()

        def last() -> int:
            return max((int(line) for line in printed(server) if line.isdigit()), default=-1)

        await eventually(lambda: last() >= 0)
        before = -2
        while before != last():  # until no more messages are sent
            before = last()
            await asyncio.sleep(0.5)
        assert last() < 2000  # 2,000 messages are 20 MB: more than the buffers of sockets, server and channel hold
        transport.abort()
        handshake_of(socket).close()
        await eventually(lambda: server.app.site.admission.attached == 0, 15)


async def test_more_sockets_than_an_isolate_takes_open_another_and_then_are_refused(
    make_server: SiteMaker, tmp_path: Path
) -> None:
    functions = table(tmp_path, sockets=2, max_isolates=2)
    async with make_server(functions=functions) as server, aiohttp.ClientSession(server.url) as client:
        sockets = [await client.ws_connect("/fn/f/echo") for _ in range(4)]
        pool = server.app.functions.served.functions.pools["f"]
        assert [isolate.work.sockets for isolate in pool.isolates.living] == [2, 2]
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect("/fn/f/echo")
        assert refused.value.status == 503
        await sockets[0].close()
        await eventually(lambda: sum(isolate.work.sockets for isolate in pool.isolates.living) == 3)
        async with client.ws_connect("/fn/f/echo") as socket:
            await socket.send_str("there is room")
            assert await socket.receive_str(timeout=60) == "there is room"
        for each in sockets:
            await each.close()
