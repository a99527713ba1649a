"""WebSockets inside real isolates: pairs, ASGI applications, Durable Objects, and sockets that pass through several functions."""

import asyncio
import json
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from runtime.bindings.binding import Services
from runtime.bindings.database import Databases
from runtime.bindings.opener import opener
from runtime.functions import worker
from runtime.functions.manifest import load_manifest
from runtime.functions.site import Response
from runtime.functions.socket_messages import Close, Message, MessageDecoder, encode
from runtime.functions.worker import Fault
from tests.asgi import eventually
from tests.runtime.functions.conftest import Served, ServedMaker

HERE = Path(sysconfig.get_path("purelib"))
UPGRADE = [("upgrade", "websocket"), ("connection", "Upgrade")]


class Socket:
    """What a site has of an open socket: messages in, messages out."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.response: Response | None = None
        self._found: list[Message] = []
        self._decoder = MessageDecoder(1 << 24)

    async def messages(self) -> AsyncIterator[bytes]:
        while data := await self.sent.get():
            yield data

    def send(self, message: Message) -> None:
        self.sent.put_nowait(encode(message))

    async def get(self) -> Message:
        assert self.response is not None
        assert self.response.stream is not None
        while not self._found:
            self._found += self._decoder.feed(await asyncio.wait_for(anext(self.response.stream), 10))
        return self._found.pop(0)

    async def ended(self) -> bool:
        assert self.response is not None
        assert self.response.stream is not None
        return [chunk async for chunk in self.response.stream] == []

    async def json(self) -> Any:
        message = await self.get()
        assert isinstance(message, str), message
        return json.loads(message)


async def ask(served: Served, path: str = "/", name: str = "f", headers: Any = (), **options: Any) -> Socket:
    socket = Socket()
    socket.response = await served.ask(
        path, name=name, body=socket.messages(), headers=[*UPGRADE, *headers], websocket=True, **options
    )
    return socket


@asynccontextmanager
async def opened(served: Served, path: str = "/", **options: Any) -> AsyncIterator[Socket]:
    socket = await ask(served, path, **options)
    assert socket.response is not None
    assert socket.response.status == 101
    try:
        yield socket
    finally:
        await socket.response.stream.aclose()  # type: ignore[union-attr]


PAIRS = """
import asyncio
from js import WebSocketPair
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.rpartition("/")[2]
        client, server = WebSocketPair.new()
        if path == "properties":
            server.onmessage = lambda event: server.send(f"{event.type} {event.data}")
            server.onclose = lambda event: print("closed", event.code, flush=True)
            server.accept()
        elif path == "once":
            server.accept()
            server.addEventListener("message", lambda event: server.send("first"), {"once": True})
            server.addEventListener("message", lambda event: server.send("each"))
        elif path == "order":
            async def slow(event):
                await asyncio.sleep(0.05 if event.data == "1" else 0)
                server.send(event.data)
            server.accept()
            server.add_event_listener("message", slow)
        elif path == "raises":
            async def bad(event):
                raise ValueError("in a handler")
            server.accept()
            server.addEventListener("message", bad)
            server.addEventListener("message", lambda event: server.send("still here"))
        elif path == "misuse":
            said = []
            for act in (lambda: server.send("early"), lambda: server.accept() or server.send({"a": 1}),
                        lambda: server.close(1005), lambda: server.close(1000, "r" * 200), lambda: server.send("x" * 2_000_000)):
                try:
                    act()
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
            server.send("\\n".join(said))
            server.close()
            try:
                server.send("late")
            except TypeError as error:
                print(error, flush=True)
        elif path == "silent":
            pass
        elif path == "fast":
            server.accept()
            try:
                for i in range(100_000):
                    server.send(b"x" * 1000)
            except BufferError as error:
                print("full after", i, error, flush=True)
        return Response(None, status=101, web_socket=client)
"""


@pytest.fixture
async def served(make_served: ServedMaker) -> AsyncIterator[Served]:
    async with make_served(tier=1) as made:
        yield made


async def test_handlers_as_properties(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/properties") as socket:
        socket.send("hello")
        assert await socket.get() == "message hello"
        socket.send(Close(4000, "bye"))
        assert await socket.get() == Close(4000, "bye")
        assert await socket.ended()
    lines = served.functions.pools["f"].workers[0].log.lines
    await eventually(lambda: "closed 4000" in lines)


async def test_a_listener_may_be_for_once(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/once") as socket:
        socket.send("a")
        socket.send("b")
        assert [await socket.get() for _ in range(3)] == ["first", "each", "each"]


async def test_handlers_overlap_as_a_browsers_do(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/order") as socket:
        for text in ("1", "2", "3"):
            socket.send(text)
        assert [await socket.get() for _ in range(3)] == ["2", "3", "1"]


async def test_what_a_handler_raises_is_logged_and_the_socket_goes_on(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/raises") as socket:
        socket.send("x")
        assert await socket.get() == "still here"
        lines = served.functions.pools["f"].workers[0].log.lines
        await eventually(lambda: any("in a handler" in line for line in lines))


async def test_misuse_has_a_sentence(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/misuse") as socket:
        text = await socket.get()
        assert isinstance(text, str)
        early, wrong, code, reason, size = text.splitlines()
        assert "before accept()" in early
        assert "json.dumps" in wrong
        assert "1005 is no code" in code
        assert "123 bytes" in reason
        assert "1048576 bytes" in size
        assert await socket.get() == Close(1000, "")
        lines = served.functions.pools["f"].workers[0].log.lines
        await eventually(lambda: any("after close()" in line for line in lines))


async def test_a_sender_that_never_waits_is_stopped(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/fast"):
        lines = served.functions.pools["f"].workers[0].log.lines
        await eventually(lambda: any("full after" in line and "await send()" in line for line in lines))


async def test_a_switch_that_nobody_asked_for_is_a_failure(served: Served) -> None:
    served.add(PAIRS)
    with pytest.raises(Fault, match="did not ask for a WebSocket"):
        await served.ask("/properties")


async def test_open_sockets_are_no_open_requests_and_their_cpu_time_is_watched(
    make_served: ServedMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SOCKETS_SHARE", 0.05)  # a busy machine may not give it half of a core
    source = """
    from js import WebSocketPair
    from workers import Response, WorkerEntrypoint
    import asyncio

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            client, server = WebSocketPair.new().object_values()
            server.accept()
            async def spin(event):
                while True:
                    await asyncio.sleep(0)
            server.addEventListener("message", spin)
            return Response(None, status=101, web_socket=client)
    """
    async with make_served(tier=1, limits={"cpu_ms": 300, "wall_s": 0.4, "idle_s": 0.1}) as served:
        served.add(source)
        async with opened(served) as socket:
            await asyncio.sleep(1.0)  # beyond both of the limits that hold for requests
            (isolate,) = served.functions.pools["f"].workers
            assert (isolate.load, isolate.sockets) == (0, 1)
            socket.send("spin")
            with pytest.raises(Fault, match="WebSockets used 300 ms"):
                await socket.get()


STARLETTE = """
import asgi
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from workers import WorkerEntrypoint

async def echo(socket):
    await socket.accept(subprotocol=socket.scope["subprotocols"][-1] if socket.scope["subprotocols"] else None,
        headers=[(b"x-path", socket.url.path.encode()), (b"x-scheme", socket.url.scheme.encode())])
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                print("left", message["code"], message["reason"], flush=True)
                return
            if message.get("text") == "close":
                return await socket.close(4003, "told to")
            if message.get("text") == "boom":
                raise ValueError("inside the socket")
            await socket.send({"type": "websocket.send", "text": message.get("text"), "bytes": message.get("bytes")})
    except WebSocketDisconnect:
        raise AssertionError

async def refuse(socket):
    await socket.close()

async def deny(socket):
    await socket.send_denial_response(PlainTextResponse("not today", 402))

async def boom(socket):
    raise ValueError("before accept")

app = Starlette(routes=[WebSocketRoute("/echo", echo), WebSocketRoute("/refuse", refuse), WebSocketRoute("/deny", deny),
    WebSocketRoute("/boom", boom)])

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""


def add(served: Served, source: str) -> None:
    served.add(source)
    served.functions.add(load_manifest(served._folder / "f"), layers=(HERE,))


async def test_an_asgi_application_has_its_socket(served: Served) -> None:
    add(served, STARLETTE)
    async with opened(served, "/echo", headers=[("sec-websocket-protocol", "a, b")]) as socket:
        assert socket.response is not None
        headers = dict(socket.response.headers)
        assert headers["sec-websocket-protocol"] == "b"
        assert (headers["x-path"], headers["x-scheme"]) == ("/echo", "ws")
        for message in ("text", "", b"\0bytes", b"", "x" * 500_000):
            socket.send(message)
            assert await socket.get() == message
        socket.send("close")
        assert await socket.get() == Close(4003, "told to")
    async with opened(served, "/echo") as socket:
        socket.send(Close(4100, "mine"))
        assert await socket.get() == Close(4100, "mine")
        lines = served.functions.pools["f"].workers[0].log.lines
        await eventually(lambda: "left 4100 mine" in lines)
    async with opened(served, "/echo") as socket:
        socket.send("boom")
        assert await socket.get() == Close(1011, "")
        await eventually(lambda: any("inside the socket" in line for line in lines))


async def test_an_asgi_application_may_refuse(served: Served) -> None:
    add(served, STARLETTE)
    refused = (await ask(served, "/refuse")).response
    denied = (await ask(served, "/deny")).response
    assert refused is not None
    assert denied is not None
    assert (refused.status, denied.status, denied.body) == (403, 402, b"not today")
    with pytest.raises(Fault, match="before accept"):
        await ask(served, "/boom")


ROOM = Path(__file__).parents[3] / "examples/functions/room"
OBJECTS = """
import json
from js import WebSocketPair, WebSocketRequestResponsePair
from workers import DurableObject, Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await self.env.ROOM.getByName("r").fetch(request)

class Room(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        ctx.setWebSocketAutoResponse(WebSocketRequestResponsePair.new("ping", "pong"))

    async def fetch(self, request):
        client, server = WebSocketPair.new().object_values()
        path = request.url.rpartition("/")[2]
        if path == "plain":
            server.accept()
            async def count(event):
                await self.ctx.storage.put("count", (await self.ctx.storage.get("count") or 0) + 1)
                server.send(str(await self.ctx.storage.get("count")))
            server.addEventListener("message", count)
        else:
            self.ctx.acceptWebSocket(server, [path, "all"])
            server.serializeAttachment({"path": path, "n": 0})
        return Response(None, status=101, web_socket=client)

    async def webSocketMessage(self, ws, message):
        if message == "abort":
            self.ctx.abort("as told")
        if message == "fail":
            raise ValueError("in webSocketMessage")
        held = ws.deserializeAttachment()
        held["n"] += 1
        ws.serializeAttachment(held)
        told = {"tags": self.ctx.getTags(ws), "attachment": held, "all": len(self.ctx.getWebSockets()),
            "same": len(self.ctx.getWebSockets(held["path"])), "kind": type(message).__name__,
            "pinged": self.ctx.getWebSocketAutoResponseTimestamp(ws) is not None}
        ws.send(json.dumps(told))

    async def webSocketClose(self, ws, code, reason, wasClean):
        print("object", code, reason, wasClean, len(self.ctx.getWebSockets()), flush=True)
"""
MANIFEST = """
[[durable_objects.bindings]]
name = "ROOM"
class_name = "Room"
[[migrations]]
tag = "v1"
new_sqlite_classes = ["Room"]
"""


@pytest.fixture
async def stateful(make_served: ServedMaker, tmp_path: Path) -> AsyncIterator[Served]:
    bindings = opener(tmp_path / "state", Services(databases=Databases()))
    async with make_served(tier=1, open_bindings=bindings) as served:
        yield served


async def test_a_durable_object_accepts_sockets_with_tags_and_attachments(stateful: Served) -> None:
    stateful.add(OBJECTS, manifest=MANIFEST)
    async with opened(stateful, "/a") as one, opened(stateful, "/b") as two:
        one.send("ping")
        assert await one.get() == "pong"
        for n in (1, 2):
            one.send("x")
            told = await one.json()
            assert told["attachment"] == {"path": "a", "n": n}
            assert (told["tags"], told["all"], told["same"], told["pinged"]) == (["a", "all"], 2, 1, True)
        two.send(b"x")
        assert (await two.json())["kind"] == "Buffer"
        two.send("fail")
        two.send("y")
        assert (await two.json())["attachment"]["n"] == 2
        one.send(Close(4000, "bye"))
        assert await one.get() == Close(4000, "bye")
        lines = stateful.functions.pools["f"].workers[0].log.lines
        await eventually(lambda: "object 4000 bye True 1" in lines)
        assert any("in webSocketMessage" in line for line in lines)
        two.send("abort")
        assert await two.get() == Close(1012, "the Durable Object was reset")


async def test_listeners_inside_an_object_are_its_events(stateful: Served) -> None:
    stateful.add(OBJECTS, manifest=MANIFEST)
    async with opened(stateful, "/plain") as socket:
        for n in (1, 2, 3):
            socket.send("x")
            assert await socket.get() == str(n)


async def test_the_example_room_tells_everybody(stateful: Served) -> None:
    stateful.functions.add(load_manifest(ROOM))
    async with opened(stateful, "/lobby?name=Ada", name="room") as ada:
        assert await ada.json() == {"joined": "Ada", "here": 1}
        async with opened(stateful, "/lobby?name=Bob", name="room") as bob:
            for socket in (ada, bob):
                assert await socket.json() == {"joined": "Bob", "here": 2}
            bob.send("hello")
            for socket in (ada, bob):
                assert await socket.json() == {"who": "Bob", "said": "hello"}
            bob.send(Close(1000, ""))
            assert await ada.json() == {"left": "Bob", "here": 1}
        async with opened(stateful, "/other?name=Eve", name="room") as eve:
            assert await eve.json() == {"joined": "Eve", "here": 1}
        async with opened(stateful, "/lobby?name=Cy", name="room") as cy:
            assert await cy.json() == {"who": "Bob", "said": "hello"}
            assert await cy.json() == {"joined": "Cy", "here": 2}


async def test_a_function_may_stand_between_a_client_and_an_objects_socket(stateful: Served) -> None:
    source = """
    from js import WebSocketPair
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            answer = await self.env.BACK.fetch(request)
            if answer.status != 101:
                return answer
            inner = answer.web_socket
            inner.accept()
            client, server = WebSocketPair.new().object_values()
            server.accept()
            server.addEventListener("message", lambda event: inner.send("to " + event.data))
            inner.addEventListener("message", lambda event: server.send("from " + event.data))
            inner.addEventListener("close", lambda event: server.close(event.code, event.reason))
            return Response(None, status=101, web_socket=client)
    """
    back = """
    from js import WebSocketPair
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            if request.url.endswith("/no"):
                return Response("no", status=403)
            client, server = WebSocketPair.new().object_values()
            server.accept()
            def on_message(event):
                server.close(4009, "enough") if event.data == "to end" else server.send(event.data)
            server.addEventListener("message", on_message)
            return Response(None, status=101, web_socket=client)
    """
    stateful.add(back, "back")
    stateful.add(source, "front", '[[services]]\nbinding = "BACK"\nservice = "back"\n')
    async with opened(stateful, "/", name="front") as socket:
        socket.send("x")
        assert await socket.get() == "from to x"
        socket.send("end")
        assert await socket.get() == Close(4009, "enough")
    refused = (await ask(stateful, "/no", name="front")).response
    assert refused is not None
    assert (refused.status, refused.body) == (403, b"no")


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
