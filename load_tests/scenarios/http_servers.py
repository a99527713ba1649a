"""Our HTTP/1.1 server compared with Hypercorn and uvicorn.

python -m load_tests.scenarios.http_servers

One Starlette application with the middleware of our processes runs in a separate process, under each server in turn, for several rounds; figures are
medians. Its routes are of the kinds that our processes have: a probe, an echo of the body, a stream of server-sent events written one by one. Client
and server share the machine, so rates are given per second of the server's processor time as well as per second of the clock.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from statistics import median
from typing import Any, NamedTuple, cast

import psutil
import uvloop
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from load_tests.peers.uvicorn_server import SERVERS, make_server
from load_tests.records import write_record
from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.listen import bind, loop_factory, url_of
from pilotlight.wire.http.middleware import BodyBudget, OriginCheck, Origins

CONNECTIONS = 64
EVENTS = 200
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'
BODY = b"x" * 1024


class MeasuredRoute(NamedTuple):
    name: str
    request: bytes
    units: int  # units of work in one request


ROUTES = (
    MeasuredRoute("livez", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n", 1),
    MeasuredRoute(
        "echo", b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY), 1
    ),
    MeasuredRoute("events", b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n", EVENTS),
)


async def livez(request: Request) -> Response:
    return PlainTextResponse("ok")


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def events(request: Request) -> Response:
    async def written() -> Any:
        for _ in range(EVENTS):
            yield EVENT
            await asyncio.sleep(0)

    return StreamingResponse(written(), media_type="text/event-stream")


async def serve(name: str) -> None:
    """Serve until the input ends."""
    app = Starlette(routes=[Route("/livez", livez), Route("/echo", echo, methods=["POST"]), Route("/events", events)])
    listener = bind("127.0.0.1", 0)
    checked = OriginCheck(BodyBudget(app, 512 << 20), Origins(is_local=True))
    server = make_server(name, checked, HttpLimits())
    await server.start(listener)
    print(url_of(listener), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.1)


class Counter(asyncio.Protocol):
    """A connection that sends a request again whenever its response has ended, until the time is up."""

    def __init__(self, request: bytes, until: float) -> None:
        self.count = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._until = request, until
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, found, body = self._heard.partition(b"\r\n\r\n")
        if not found:
            return
        _, has_length, rest = head.lower().partition(b"content-length: ")
        is_whole = len(body) >= int(rest.partition(b"\r\n")[0]) if has_length else body.endswith(b"0\r\n\r\n")
        if not is_whole:
            return
        assert b" 200 " in head[:20], head
        self._heard = b""
        self.count += 1
        if time.monotonic() < self._until:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


async def measured(port: int, process: psutil.Process, route: MeasuredRoute, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    before, began = process.cpu_times(), time.monotonic()
    counters = [
        (await loop.create_connection(lambda: Counter(route.request, began + seconds), "127.0.0.1", port))[1]
        for _ in range(CONNECTIONS)
    ]
    await asyncio.gather(*(counter.done for counter in counters))
    after, took = process.cpu_times(), time.monotonic() - began
    units = sum(counter.count for counter in counters) * route.units
    cpu_s = after.user + after.system - before.user - before.system
    return {"per_s": units / took, "per_cpu_s": units / cpu_s}


async def round_of(name: str, seconds: float) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "load_tests.scenarios.http_servers", "--serve", name]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = int((await process.stdout.readline()).rpartition(b":")[2])
    found = {}
    for route in ROUTES:
        await measured(port, psutil.Process(process.pid), route, 0.3)
        found[route.name] = await measured(port, psutil.Process(process.pid), route, seconds)
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=SERVERS, help="be the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    run: Coroutine[Any, Any, None] = (
        serve(arguments.serve) if arguments.serve else compare(arguments.rounds, arguments.seconds, arguments.no_record)
    )
    with asyncio.Runner(loop_factory=loop_factory() if arguments.serve else uvloop.new_event_loop) as runner:
        runner.run(run)


async def compare(rounds: int, seconds: float, no_record: bool) -> None:
    made: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in SERVERS}
    for _ in range(rounds):
        for name in SERVERS:
            made[name].append(await round_of(name, seconds))
    lines = [
        {
            "server": name,
            "route": route.name,
            **{key: round(median(each[route.name][key] for each in made[name])) for key in ("per_s", "per_cpu_s")},
        }
        for route in ROUTES
        for name in SERVERS
    ]
    table = Table("route", "server", "per second", "per second of its processor time")
    for line in lines:
        table.add_row(*(str(line[key]) for key in ("route", "server", "per_s", "per_cpu_s")))
    console = Console()
    console.print(table)
    if not no_record:
        results = {"connections": CONNECTIONS, "rounds": rounds, "seconds": seconds, "lines": lines}
        versions = ("hypercorn", "uvicorn", "starlette", "httptools", "uvloop")
        console.print(f"Record: {write_record('http-servers', results, versions)}", soft_wrap=True)


if __name__ == "__main__":
    main()
