"""fetch as functions call it: aborts, failures, and invalid arguments."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.asgi import eventually
from tests.functions.conftest import ServedMaker
from tests.functions.sdk.test_conventions import default

ABORTED = """
from js import AbortController, AbortSignal
from workers import Request
async def aborted(work):
    try:
        return await work
    except Exception as error:
        return f"{error.name}: {error}"
controller, heard = AbortController.new(), []
async def read():
    response = await fetch(request.headers["x-to"] + "/begins", signal=controller.signal)
    async for piece in response.body:
        heard.append(bytes(piece).decode())
        controller.abort("enough")
found = [await aborted(fetch(request.headers["x-to"], signal=AbortSignal.timeout(50))), await aborted(read()), heard]
found += [await aborted(fetch(Request(request.headers["x-to"]), {"signal": controller.signal}))]
return Response.json(found)
"""
OPTIONS = """
from workers import Request
asked = Request("http://a.example/x", method="POST", body="b", headers={"x-own": "1"}, redirect="error")
made = [Request(asked), Request(asked, redirect="manual"), Request("http://b.example/", asked), Request(asked, {"method": "put"})]
found = [[r.url, r.method, r.headers["x-own"], r.redirect] for r in made]
for options in ({"metod": "POST"}, {"timeout": 5}, {"referrerPolicy": "origin", "keepalive": True, "method": None}):
    try:
        found.append(Request("http://a.example/", options).method)
    except TypeError as error:
        found.append(str(error))
return Response.json(found)
"""


@asynccontextmanager
async def slow() -> AsyncIterator[tuple[str, list[bytes], list[bytes]]]:
    """Start a server that never answers, or stops in mid-answer.
    Yields its address, the received requests, and those whose client has disconnected."""
    came: list[bytes] = []
    left: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(line := await reader.readline())
        await reader.readuntil(b"\r\n\r\n")
        if b"/begins" in line:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\none")
        await reader.read()
        left.append(line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came, left


async def test_a_signal_ends_a_fetch_and_its_stream(make_served: ServedMaker) -> None:
    async with slow() as (place, came, left), make_served(tier=1, egress_allow=["127.0.0.1"]) as served:
        served.add(default(ABORTED))
        said = json.loads(await served.get("/", headers=[("x-to", place)]))
        assert said == [
            "AbortError: the call was aborted: 50 ms have passed",
            "AbortError: the call was aborted: enough",
            ["one"],
            "AbortError: the call was aborted: enough",
        ]
        assert len(came) == 2, "a request with an aborted signal is not sent"
        await eventually(lambda: left == came)


async def test_a_request_takes_options_from_another_and_none_that_it_does_not_know(make_served: ServedMaker) -> None:
    async with make_served(tier=1) as served:
        served.add(default(OPTIONS))
        assert json.loads(await served.get()) == [
            ["http://a.example/x", "POST", "1", "error"],
            ["http://a.example/x", "POST", "1", "manual"],
            ["http://b.example/", "POST", "1", "error"],
            ["http://a.example/x", "PUT", "1", "error"],
            "a request has no option 'metod'; did you mean 'method'?",
            "a request has no option 'timeout'",
            "GET",
        ]
