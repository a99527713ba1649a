"""WebSockets in real isolates: pairs and their handlers, ASGI applications, and CPU limits of open sockets."""

import asyncio
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import SocketClose
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.manifest import load_manifest
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker
from tests.functions.sdk.sockets import ask, opened

HERE = Path(sysconfig.get_path("purelib"))
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
        socket.send(SocketClose(4000, "bye"))
        assert await socket.get() == SocketClose(4000, "bye")
        assert await socket.ended()
    lines = served.functions.pools["f"].isolates.living[0].process.log.lines
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


async def test_an_exception_of_a_handler_is_logged_and_the_socket_stays_open(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/raises") as socket:
        socket.send("x")
        assert await socket.get() == "still here"
        lines = served.functions.pools["f"].isolates.living[0].process.log.lines
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
        assert await socket.get() == SocketClose(1000, "")
        lines = served.functions.pools["f"].isolates.living[0].process.log.lines
        await eventually(lambda: any("after close()" in line for line in lines))


async def test_a_sender_that_never_waits_is_stopped(served: Served) -> None:
    served.add(PAIRS)
    async with opened(served, "/fast"):
        lines = served.functions.pools["f"].isolates.living[0].process.log.lines
        await eventually(lambda: any("full after" in line and "await send()" in line for line in lines))


async def test_a_switch_that_was_not_requested_is_a_failure(served: Served) -> None:
    served.add(PAIRS)
    with pytest.raises(Fault, match="did not ask for a WebSocket"):
        await served.ask("/properties")


UNSENT = """
import asyncio
from workers import Response, WorkerEntrypoint
from workers.sockets.joints import Joint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        joint = Joint()
        joint.socket.accept()
        await joint.body.aclose()
        async with asyncio.timeout(60):
            close = await joint.socket.receive()
        return Response(f"{close.code}")
"""


async def test_a_socket_whose_messages_were_never_read_is_closed_with_them(served: Served) -> None:
    served.add(UNSENT)
    assert await served.get() == b"1006"


async def test_a_socket_that_has_closed_leaves_its_place_to_another(make_served: ServedMaker) -> None:
    async with make_served(tier=1, limits={"sockets": 1, "max_isolates": 1}) as served:
        served.add(PAIRS)
        async with opened(served, "/properties"):
            with pytest.raises(Failure, match="reached its limit of open WebSockets"):
                await ask(served, "/properties")
        async with opened(served, "/properties") as socket:
            socket.send("here")
            assert await socket.get() == "message here"


async def test_open_sockets_are_no_open_requests_and_their_cpu_time_is_watched(make_served: ServedMaker) -> None:
    share = 0.05  # a busy machine may not give the isolate half of a core
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
    async with make_served(
        tier=1, limits={"cpu_ms": 300, "wall_s": 0.4, "idle_s": 0.1, "sockets_share": share}
    ) as served:
        served.add(source)
        async with opened(served) as socket:
            await asyncio.sleep(1.0)  # longer than both limits for requests
            (isolate,) = served.functions.pools["f"].isolates.living
            assert (isolate.work.load, isolate.work.sockets) == (0, 1)
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
    served.functions.add(load_manifest(served.folder / "f"), layers=(HERE,))


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
        assert await socket.get() == SocketClose(4003, "told to")
    async with opened(served, "/echo") as socket:
        socket.send(SocketClose(4100, "mine"))
        assert await socket.get() == SocketClose(4100, "mine")
        lines = served.functions.pools["f"].isolates.living[0].process.log.lines
        await eventually(lambda: "left 4100 mine" in lines)
    async with opened(served, "/echo") as socket:
        socket.send("boom")
        assert await socket.get() == SocketClose(1011, "")
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
