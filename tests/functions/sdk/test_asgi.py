"""ASGI and WSGI applications that continue after the end of their response, in real isolates."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

ASGI = """
import asyncio
import asgi
from workers import WorkerEntrypoint

told, go = [], asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    path = scope["path"]
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        if path == "/closes":
            await send({"type": "websocket.close"})
        else:
            while (await receive())["type"] != "websocket.disconnect":
                pass
        await go.wait()
        told.append("after the socket")
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if path == "/told":
        await send({"type": "http.response.body", "body": ",".join(told).encode()})
    elif path == "/go":
        go.set()
        await send({"type": "http.response.body", "body": b"gone on"})
    elif path == "/whole":
        await send({"type": "http.response.body", "body": b"whole"})
        await go.wait()
        told.append("after the whole")
    elif path == "/stream":
        await send({"type": "http.response.body", "body": b"[DONE]", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await go.wait()
        told.append("after the stream")
    elif path == "/late":
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        raise ValueError("behind the response")
    elif path == "/twice":
        await send({"type": "http.response.body", "body": b"one"})
        try:
            await send({"type": "http.response.body", "body": b"two"})
        except RuntimeError as error:
            told.append(str(error))
    elif path == "/endless":
        try:
            while True:
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
        finally:
            told.append("cancelled")
    elif path == "/long":
        for piece in range(5):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        told.append("sent")
        await send({"type": "http.response.body", "body": b""})

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env, self.ctx)
"""
WSGI = """
import threading
import wsgi
from workers import WorkerEntrypoint

told, go = [], threading.Event()

class Pieces:
    def __init__(self, slow):
        self.slow, self.at_work, self.count = slow, False, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        if self.count > 2:
            self.at_work = True
            if self.slow:
                go.wait(60)
            self.at_work = False
            raise StopIteration
        return b"piece"

    def close(self):
        told.append("closed at work" if self.at_work else "closed")

def app(environ, start_response):
    start_response("200 OK", [])
    if environ["PATH_INFO"] == "/told":
        return [",".join(told).encode()]
    if environ["PATH_INFO"] == "/go":
        go.set()
        return [b"gone on"]
    return Pieces(environ["PATH_INFO"] == "/slow")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await wsgi.fetch(app, request, self.env)
"""


@pytest.fixture
async def served(make_served: ServedMaker) -> AsyncIterator[Served]:
    async with make_served(tier=1) as made:
        made.add(ASGI)
        made.add(WSGI, "w")
        yield made


async def told(served: Served, wanted: Callable[[str], bool], name: str = "f") -> None:
    async with asyncio.timeout(30):
        while not wanted(found := (await served.get("/told", name=name)).decode()):  # noqa: F841 - a failing test shows it
            await asyncio.sleep(0.01)


async def test_a_response_ends_with_its_last_body_and_its_application_continues(served: Served) -> None:
    assert await served.get("/stream") == b"[DONE]"
    assert await served.get("/whole") == b"whole"
    pool = served.functions.pools["f"]
    await eventually(lambda: pool.isolates.living[0].work.background == 2)
    assert await served.get("/go") == b"gone on"
    await told(served, lambda found: set(found.split(",")) == {"after the stream", "after the whole"})
    await eventually(lambda: not pool.isolates.is_at_work)


async def test_the_application_continues_though_its_client_leaves(served: Served) -> None:
    response = await served.ask("/stream")
    stream: Any = response.stream
    assert await anext(stream) == b"[DONE]"
    await stream.aclose()
    await served.get("/go")
    await told(served, lambda found: found == "after the stream")


async def test_an_application_that_is_still_sending_ends_when_its_client_leaves(served: Served) -> None:
    response = await served.ask("/endless")
    stream: Any = response.stream
    assert (await anext(stream)).startswith(b"more")
    await stream.aclose()
    await told(served, lambda found: found == "cancelled")


async def test_an_exception_of_an_application_after_its_response_is_printed(served: Served) -> None:
    assert await served.get("/late") == b"first"
    lines = served.functions.pools["f"].isolates.living[0].process.log.lines
    await eventually(lambda: any("behind the response" in line for line in lines))


async def test_an_applications_exceptions_reach_the_logger_of_the_platforms_sdk(served: Served) -> None:
    source = """
    import asyncio, json, logging, asgi
    from workers import Response, WorkerEntrypoint

    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            logged.append(f"{record.getMessage()}: {record.exc_info[1]}, {record.exc_info[2].tb_frame.f_code.co_name}")

    logging.getLogger("asgi").addHandler(Handler())

    async def late(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
            raise ValueError("late")

    async def early(scope, receive, send):
        if scope["type"] == "http":
            raise ValueError("early")

    async def work():
        raise ValueError("work")

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            await asgi.fetch(late, request, self.env, self.ctx)
            try:
                await asgi.fetch(early, request, self.env, self.ctx)
            except ValueError:
                asgi.run_in_background(work())
            await asyncio.sleep(0.01)
            return Response(json.dumps(logged))
    """
    served.add(source, name="logging")
    assert json.loads(await served.get(name="logging")) == [
        "Exception in ASGI application after response started: late, late",
        "ASGI request failed: early, early",
        "Unhandled exception in background task: work, work",
    ]


async def test_a_body_that_was_ended_takes_no_more(served: Served) -> None:
    assert await served.get("/twice") == b"one"
    await told(served, lambda found: "more of a body that was complete" in found)


async def test_a_head_request_gets_no_body_and_its_application_runs_to_its_end(served: Served) -> None:
    for _ in range(3):
        response = await served.ask("/long", method="HEAD")
        assert (response.status, response.body, response.stream) == (200, b"", None)
    await told(served, lambda found: found == "sent,sent,sent")
    assert (await served.ask("/pieces", name="w", method="HEAD")).stream is None
    await told(served, lambda found: found == "closed", "w")


@pytest.mark.parametrize("path", ["/closes", "/waits"])
async def test_an_application_continues_after_its_socket(served: Served, path: str) -> None:
    async def messages() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    headers = [("connection", "Upgrade"), ("upgrade", "websocket")]
    response = await served.ask(path, headers=headers, body=messages(), websocket=True)
    stream: Any = response.stream
    pool = served.functions.pools["f"]
    await stream.aclose()
    await eventually(lambda: pool.isolates.living[0].work.background == 1)
    await served.get("/go")
    await told(served, lambda found: found == "after the socket")


async def test_what_a_wsgi_application_gave_is_closed_once_and_not_while_it_runs(served: Served) -> None:
    assert await served.get("/pieces", name="w") == b"piecepiece"
    await told(served, lambda found: found == "closed", "w")
    response = await served.ask("/slow", name="w")
    stream: Any = response.stream
    taken = b""
    while len(taken) < len(b"piecepiece"):  # one read may return both chunks
        taken += await anext(stream)
    assert taken == b"piecepiece"
    await stream.aclose()
    await served.get("/go", name="w")
    await told(served, lambda found: found == "closed,closed", "w")
