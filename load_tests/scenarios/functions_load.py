"""Functions under load, for `make bench-functions`.

Compares requests per second with other servers, and the first token of a stream from env.AI with that of the same stream without a function.
"""

import asyncio
import http.client
import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from load_tests.http_load import closed_loop, request_of
from load_tests.peers import hello
from load_tests.records import percentiles

CONNECTIONS = 32
SETTLE_S = 1.0


def rates(ours: dict[str, tuple[int, str]], peers: Path | None, seconds: float) -> list[dict[str, Any]]:
    """Measure our servers, given by name as (port, path), then the installed peers, one at a time."""
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


def first_tokens(port: int, function: str, model: str, number: int) -> dict[str, Any]:
    """Time the first event of a stream, through a function's env.AI and from the route itself, in turns."""
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
