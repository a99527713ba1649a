"""WebSockets that Durable Objects accept, in real isolates, and sockets that pass through several functions."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.channel.socket_messages import SocketClose
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.manifest import load_manifest
from pilotlight.support.database import Databases
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker
from tests.functions.sdk.sockets import ask, opened

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
                if event.data == "abort":
                    self.ctx.abort("as told")
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
    bindings = partial(FunctionBindings.open, tmp_path / "state", Services(databases=Databases()))
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
        one.send(SocketClose(4000, "bye"))
        assert await one.get() == SocketClose(4000, "bye")
        lines = stateful.functions.pools["f"].isolates.living[0].process.log.lines
        await eventually(lambda: "object 4000 bye True 1" in lines)
        assert any("in webSocketMessage" in line for line in lines)
        two.send("abort")
        assert await two.get() == SocketClose(1012, "the Durable Object was reset")


@pytest.mark.parametrize("path", ["/plain", "/a"])
async def test_a_discarded_object_closes_its_sockets_and_gets_no_further_events(stateful: Served, path: str) -> None:
    stateful.add(OBJECTS, manifest=MANIFEST)
    async with opened(stateful, path) as socket:
        socket.send("abort")
        async with asyncio.timeout(10):
            assert await socket.get() == SocketClose(1012, "the Durable Object was reset")
        socket.send("x")
        async with opened(stateful, "/a") as other:
            other.send("ping")
            assert await other.get() == "pong"
        lines = stateful.functions.pools["f"].isolates.living[0].process.log.lines
        assert sum("Error: the Durable Object aborted itself" in line for line in lines) == 1


async def test_listeners_inside_an_object_are_its_events(stateful: Served) -> None:
    stateful.add(OBJECTS, manifest=MANIFEST)
    async with opened(stateful, "/plain") as socket:
        for n in (1, 2, 3):
            socket.send("x")
            assert await socket.get() == str(n)


async def test_the_example_room_sends_to_all(stateful: Served) -> None:
    stateful.functions.add(load_manifest(ROOM))
    async with opened(stateful, "/lobby?name=Ada", name="room") as ada:
        assert await ada.json() == {"joined": "Ada", "here": 1}
        async with opened(stateful, "/lobby?name=Bob", name="room") as bob:
            for socket in (ada, bob):
                assert await socket.json() == {"joined": "Bob", "here": 2}
            bob.send("hello")
            for socket in (ada, bob):
                assert await socket.json() == {"who": "Bob", "said": "hello"}
            bob.send(SocketClose(1000, ""))
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
        assert await socket.get() == SocketClose(4009, "enough")
    refused = (await ask(stateful, "/no", name="front")).response
    assert refused is not None
    assert (refused.status, refused.body) == (403, b"no")
