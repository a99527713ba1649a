"""What a site with functions does under load, for `make bench-functions`: requests per second beside other servers, a well-behaved function beside
hostile ones, and the first token of a stream from env.AI beside the same stream without a function."""

import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from load_tests.http_load import closed_loop, open_loop, request_of
from load_tests.peers import hello
from load_tests.records import spread

CONNECTIONS = 32
GOOD_PER_S = 100.0
SETTLE_S = 1.0
AWAKE_S = 5.0  # after a site's start, until its engine has all that it wants

HOSTILE = {
    "loops for ever": "while True:\n    pass",
    "blocks its event loop": "time.sleep(60)",
    "allocates without end": "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))",
    "forks without end": "while True:\n    if os.fork() == 0:\n        time.sleep(60)",
    "exits": "os._exit(3)",
    "writes a gigabyte": "with open(os.environ['TMPDIR'] + '/big', 'wb') as f:\n    for _ in range(1024):\n        f.write(bytes(1 << 20))",
    "prints without end": "while True:\n    print('x' * 1000)",
    "raises in its stream": "async def s():\n    yield 'first'\n    raise ValueError('late')\nreturn Response(s())",
    "streams to a reader who does not read": "async def s():\n    while True:\n        yield bytes(60_000)\nreturn Response(s())",
    "imports something missing": "import not_there",
}  # fmt: skip


def hostile_source(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"import os, time\nfrom workers import *\nclass Default(WorkerEntrypoint):\n    async def fetch(self, request):\n{lines}\n"


def hostile_names() -> dict[str, str]:
    return {name: "hostile-" + name.replace(" ", "-") for name in HOSTILE}


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{share}": round(ordered[int(share / 100 * (len(ordered) - 1))], 3) for share in (50, 95, 99)}
    return {**spread(values), **at}


def rates(ours: dict[str, tuple[int, str]], peers: Path | None, seconds: float) -> list[dict[str, Any]]:
    """One after the other in one run: ours by name (port, path), then whatever is there of the peers."""
    rows = [rate(name, port, request_of(path), seconds) for name, (port, path) in ours.items()]
    for peer in hello.there(peers) if peers is not None else ():
        with hello.running(peer, peers or Path()) as port:
            request = request_of(peer.path, peer.method, peer.body)
            if _answers(port, request):
                rows.append(rate(peer.name, port, request, seconds))
    return rows


def rate(name: str, port: int, request: bytes, seconds: float) -> dict[str, Any]:
    asyncio.run(closed_loop(port, request, CONNECTIONS, SETTLE_S))
    load = asyncio.run(closed_loop(port, request, CONNECTIONS, seconds))
    found = percentiles(load.latencies_ms)
    return {
        "server": name,
        "requests_per_s": round(load.requests_per_s, 1),
        "failed": load.failed,
        "latency_ms": found,
        "connections": CONNECTIONS,
    }


def beside_hostile_ones(port: int, good: str, seconds: float) -> dict[str, Any]:
    """The well-behaved function's p99 in quiet, and while each of the hostile ones is asked again and again.

    The clients stand for other machines: the one that measures comes before everybody on this one where that may be asked of the kernel, and those
    that ask the hostile functions are a process of their own."""
    with _first_in_line():
        asyncio.run(open_loop(port, request_of(good), GOOD_PER_S, AWAKE_S))
        rows = [{"beside": "nothing", **_asked(port, good, seconds)}]
    for name, function in hostile_names().items():
        with _kept_busy(port, f"/fn/{function}/"), _first_in_line():
            rows.append({"beside": name, **_asked(port, good, seconds)})
        time.sleep(0.3)
    return {"requests_per_s": GOOD_PER_S, "rows": rows}


def _asked(port: int, good: str, seconds: float) -> dict[str, Any]:
    waited_ms = _waited_ms()
    load = asyncio.run(open_loop(port, request_of(good), GOOD_PER_S, seconds))
    waited_ms = (_waited_ms() - waited_ms) / max(1, len(load.latencies_ms))
    return {
        "latency_ms": percentiles(load.latencies_ms),
        "client_waited_ms": round(waited_ms, 4),
        "lost": load.failed,
    }


def _waited_ms() -> float:
    """For how long this thread could have run and another one did: what the client itself adds to its latencies."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


@contextmanager
def _first_in_line() -> Iterator[None]:
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield  # the record's client_waited_ms says what that did
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


@contextmanager
def _kept_busy(port: int, path: str) -> Iterator[None]:
    """Two clients that ask it as soon as they have their answer; one of them does not read what comes."""
    context = multiprocessing.get_context("spawn")
    begun, ended = context.Event(), context.Event()
    process = context.Process(target=_keep_asking, args=(port, path, begun, ended), daemon=True)
    process.start()
    try:
        begun.wait(30)
        time.sleep(0.2)
        yield
    finally:
        ended.set()
        process.join(10)


def _keep_asking(port: int, path: str, begun: Event, ended: Event) -> None:
    def ask(reads: bool) -> None:
        while not ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as connection:
                    connection.settimeout(1.0)
                    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode())
                    while reads and not ended.is_set() and connection.recv(65536):
                        pass
                    ended.wait(0.05 if reads else 1.0)
            except OSError:
                ended.wait(0.02)

    threads = [threading.Thread(target=ask, args=(reads,)) for reads in (True, False)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join()


def first_tokens(port: int, function: str, model: str, number: int) -> dict[str, Any]:
    """Time to the first event of a stream, through a function's env.AI and from the route itself, in turns."""
    body = json.dumps({"prompt": "Where is Oslo?", "max_tokens": 4, "stream": True})
    paths = {"function": f"/fn/{function}/", "route": f"/client/v4/accounts/bench/ai/run/{model}"}
    taken: dict[str, list[float]] = {name: [] for name in paths}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for index in range(number + 5):
        for name, path in paths.items():
            began = time.perf_counter()
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            first = answer.read1(65536)
            took = 1e3 * (time.perf_counter() - began)
            answer.read()
            if answer.status != 200 or not first.startswith((b"data:", b"id:")):
                raise SystemExit(f"{path} answered {answer.status} {first[:200]!r}")
            if index >= 5:
                taken[name].append(took)
    added = statistics.median(taken["function"]) - statistics.median(taken["route"])
    return {name: percentiles(times) for name, times in taken.items()} | {"added_p50_ms": round(added, 3)}


def _answers(port: int, request: bytes, wait_s: float = 60.0) -> bool:
    ends_at = time.monotonic() + wait_s
    while time.monotonic() < ends_at:
        try:
            with socket.create_connection(("127.0.0.1", port), 2) as connection:
                connection.settimeout(5)
                connection.sendall(request)
                if connection.recv(65536).startswith(b"HTTP/1.1 200"):
                    return True
        except OSError:
            pass
        time.sleep(0.2)
    return False
