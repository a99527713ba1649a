"""Functions: cold starts and what a warm call costs: `make bench-functions` runs it: python -m load_tests.scenarios.functions.

A whole site in a process of its own (with the embedded model, which these functions do not ask), and a client on the same machine. A cold start is
measured from the request's first byte in to the answer's first byte out, with no process of the function alive: once with nothing of it in memory
(a new version), once with its zygote (scaled to zero). The warm cost is a call of the function beside a call of a route of the site itself, in turns.
Targets: cold p50 <= 15 ms plain, <= 60 ms with FastAPI, httpx and pydantic; warm overhead p50 <= 1.5 ms.
"""

import argparse
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_tests.records import spread, write_record

PLAIN = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("hi")
"""
FASTAPI = """
import asgi
import httpx
from fastapi import FastAPI
from pydantic import BaseModel
from workers import WorkerEntrypoint

app = FastAPI()
client = httpx.AsyncClient

class Item(BaseModel):
    name: str
    price: float = 1.5

@app.get("/")
async def root() -> Item:
    return Item(name="hi")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""
TARGETS = {"plain": 15.0, "fastapi": 60.0, "warm overhead": 1.5}
IDLE_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=30, help="cold starts of each kind")
    parser.add_argument("--warm", type=int, default=2000, help="warm calls of each kind")
    parser.add_argument(
        "--layer", type=Path, help="a directory with fastapi and httpx; installed with pip where it is not given"
    )
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with console.status("installing FastAPI and httpx"):
            layer = options.layer or install(folder / "layer")
        results = measure(folder, layer, options.cold, options.warm, console)
    show(console, results)
    console.print(f"Record: {write_record('functions', results, ('msgspec', 'hypercorn'))}", soft_wrap=True)


def install(layer: Path) -> Path | None:
    """None where packages cannot be had: then only the plain function is measured."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(layer)]
    done = subprocess.run([*command, "fastapi", "httpx"], capture_output=True, text=True, check=False)
    return layer if done.returncode == 0 else None


def measure(folder: Path, layer: Path | None, cold: int, warm: int, console: Console) -> dict[str, Any]:
    sources = {"plain": PLAIN} | ({"fastapi": FASTAPI} if layer is not None else {})
    results: dict[str, Any] = {"targets_ms": TARGETS, "cold_ms": {}, "wake_ms": {}}
    for kind, source in sources.items():
        # Each cold start is of another function: nothing of it is in memory.
        for index in range(cold):
            write_function(folder / f"{kind}{index}", f"{kind}{index}", source)
    with running_site(folder, sources, cold, layer) as (port, tier):
        results["isolation_tier"] = tier
        for kind in sources:
            with console.status(f"cold starts of {kind}"):
                first = [first_byte_ms(port, f"/fn/{kind}{index}/") for index in range(cold)]
                time.sleep(4 * IDLE_S + 0.5)  # all of them fall asleep
                again = [first_byte_ms(port, f"/fn/{kind}{index}/") for index in range(cold)]
            results["cold_ms"][kind] = percentiles(first)
            results["wake_ms"][kind] = percentiles(again)
        with console.status("warm calls"):
            function, route = warm_ms(port, warm)
        results["warm_ms"] = {"function": percentiles(function), "route": percentiles(route)}
        overhead = statistics.median(function) - statistics.median(route)
        results["warm_overhead_p50_ms"] = round(overhead, 3)
    return results


def write_function(folder: Path, name: str, source: str) -> None:
    (folder / "src").mkdir(parents=True)
    (folder / "src/entry.py").write_text(source)
    (folder / "wrangler.toml").write_text(f'name = "{name}"\nmain = "src/entry.py"\n')


@contextmanager
def running_site(folder: Path, kinds: Any, cold: int, layer: Path | None) -> Iterator[tuple[int, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = [
        'name = "bench"', 'place = { city = "here", latitude = 0.0, longitude = 0.0 }', f"listen = {{ port = {port} }}",
        "[[models]]", 'name = "ember"', 'source = "embedded:ember"', 'residency = "disk"',
        "[functions]", f'state_dir = "{folder / "state"}"', f"idle_s = {IDLE_S}",
    ]  # fmt: skip
    for kind in kinds:
        for index in range(cold):
            lines += ["[[functions.serve]]", f'name = "{kind}{index}"', f'path = "{folder / f"{kind}{index}"}"']
            if kind == "fastapi":
                lines.append(f'layer = "{layer}"')
    file = folder / "site.toml"
    file.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([sys.executable, "-m", "runtime", str(file)], stderr=subprocess.DEVNULL)
    try:
        yield port, _ready(port, process)
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder / "state", ignore_errors=True)


def _ready(port: int, process: "subprocess.Popen[bytes]") -> int:
    """The isolation tier, once the site is ready."""
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                connection.request("GET", "/status")
                return int(json.load(connection.getresponse())["functions"]["isolation_tier"])
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit("the site did not become ready")


def first_byte_ms(port: int, path: str) -> float:
    """From the request's first byte to the answer's first byte, on a connection that is open already."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode()
        began = time.perf_counter()
        connection.sendall(request)
        first = connection.recv(65536)
        took = 1e3 * (time.perf_counter() - began)
        if not first.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{path} answered {first[:200]!r}")
        while connection.recv(65536):
            pass
    return took


def warm_ms(port: int, number: int) -> tuple[list[float], list[float]]:
    """Calls of a function and of a route of the site, taking turns on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    taken: dict[str, list[float]] = {"/fn/plain0/": [], "/livez": []}
    for index in range(number + 50):
        for path, times in taken.items():
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            if index >= 50:
                times.append(1e3 * (time.perf_counter() - began))
            if answer.status != 200:
                raise SystemExit(f"{path} answered {answer.status}")
    return taken["/fn/plain0/"], taken["/livez"]


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    found = spread(values)
    return {**found, "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3)}


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("what", "p50 ms", "p95", "min", "max", "target", box=None, header_style="bold")
    rows = [
        *((f"cold, {kind}, new", values, TARGETS[kind]) for kind, values in results["cold_ms"].items()),
        *((f"cold, {kind}, from zero", values, TARGETS[kind]) for kind, values in results["wake_ms"].items()),
        ("warm call", results["warm_ms"]["function"], None),
        ("a route of the site", results["warm_ms"]["route"], None),
    ]
    for name, values, target in rows:
        cells = [f"{values[key]:.2f}" for key in ("median", "p95", "min", "max")]
        table.add_row(name, *cells, "" if target is None else f"{target:g}")
    console.print(table)
    console.print(f"warm overhead p50 {results['warm_overhead_p50_ms']:.3f} ms (target {TARGETS['warm overhead']:g})")


if __name__ == "__main__":
    main()
