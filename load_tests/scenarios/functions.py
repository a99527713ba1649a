"""Functions: cold starts, the cost of a warm call, and a site's capacity.

`make bench-functions` runs it: python -m load_tests.scenarios.functions.

A whole site with the embedded model runs in a separate process, and the client on the same machine. A cold start lasts from the request's first byte
to the answer's first byte, without a live isolate of the function: for a new function whose zygote was started at its deploy and has imported its
packages, for one scaled to zero, and for one whose zygote was evicted, so that no part of it is in memory. The warm cost is the difference between
calls of the function and of a route of the site, in turns. Targets: cold p50 <= 15 ms plain, <= 60 ms with FastAPI, httpx and pydantic; warm overhead
p50 <= 1.5 ms; first token of env.AI within 5 ms of the route's; a neighbour's p99 beside hostile functions at most twice that of the quiet period
before, in the median round.
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

from load_tests.local_network import free_ports
from load_tests.records import percentiles, write_record
from load_tests.scenarios.functions_load import first_tokens, rates
from load_tests.scenarios.functions_neighbours import beside_hostile_ones, hostile_names, hostile_source

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
CHAT = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(await self.env.AI.run("ember", await request.json()), headers={"content-type": "text/event-stream"})
"""
TARGETS = {"plain": 15.0, "fastapi": 60.0, "warm overhead": 1.5, "first token added": 5.0, "p99 beside hostile": 2.0}
KINDS = {"plain": PLAIN, "fastapi": FASTAPI}
IDLE_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=20, help="cold starts of each kind")
    parser.add_argument("--warm", type=int, default=2000, help="warm calls of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load per server and per period")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of quiet and hostile periods in turns")
    parser.add_argument("--peers", type=Path, help="the folder that functions_setup.sh has filled")
    parser.add_argument(
        "--layer", type=Path, help="a directory with fastapi and httpx; by default the peers', else installed"
    )
    parser.add_argument(
        "--only", choices=["cold", "warm", "rates", "ai", "hostile"], action="append", help="no record then"
    )
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with console.status("FastAPI and httpx"):
            layer = options.layer or layer_of(options.peers) or install(folder / "layer")
        results = measure(folder, layer, options, console)
    show(console, results)
    if not options.only:
        console.print(
            f"Record: {write_record('functions', results, ('msgspec', 'hypercorn', 'torch'))}", soft_wrap=True
        )


def layer_of(peers: Path | None) -> Path | None:
    layer = None if peers is None else peers / "functions-layer"
    return layer.absolute() if layer is not None and (layer / "fastapi").is_dir() else None


def install(layer: Path) -> Path | None:
    """Install the packages; return None if they are unavailable: only the plain function is measured."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(layer)]
    done = subprocess.run([*command, "fastapi", "httpx"], capture_output=True, text=True, check=False)
    return layer if done.returncode == 0 else None


def measure(folder: Path, layer: Path | None, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    results: dict[str, Any] = {"targets": TARGETS}
    wanted = options.only or ["cold", "warm", "rates", "ai", "hostile"]
    kinds = KINDS if layer is not None else {"plain": PLAIN}
    functions = {f"{kind}{index}": source for kind, source in kinds.items() for index in range(options.cold)}
    if "cold" in wanted:
        results["cold_ms"] = cold_starts(folder / "cold", functions, layer, options.cold, console)
    functions = {"plain0": PLAIN, "chat": CHAT}
    functions |= {name: hostile_source(what) for what, name in hostile_names().items()}
    functions |= {"fastapi0": FASTAPI} if layer is not None else {}
    with running_site(folder / "warm", functions, layer, idle_s=60.0, zygotes_mib=1024) as (port, tier):
        results["isolation_tier"] = tier
        if "warm" in wanted:
            with console.status("warm calls"):
                function, route = warm_ms(port, options.warm)
            overhead = statistics.median(function) - statistics.median(route)
            results["warm_ms"] = {"function": percentiles(function), "route": percentiles(route)}
            results["warm_overhead_p50_ms"] = round(overhead, 3)
        if "ai" in wanted:
            with console.status("first tokens"):
                results["first_token_ms"] = first_tokens(port, "chat", "ember", 100)
        if "rates" in wanted:
            ours = {"a function": (port, "/fn/plain0/"), "a route of the site": (port, "/livez")}
            ours |= {"a function with FastAPI": (port, "/fn/fastapi0/")} if layer is not None else {}
            with console.status("requests per second"):
                results["rates"] = rates(ours, options.peers, options.seconds)
        if "hostile" in wanted:
            with console.status("beside hostile functions"):
                results["hostile"] = beside_hostile_ones(port, "/fn/plain0/", options.seconds, options.rounds)
    return results


def cold_starts(
    folder: Path, functions: dict[str, str], layer: Path | None, number: int, console: Console
) -> dict[str, Any]:
    """Measure cold starts, each of a different function, so that none is in memory."""
    results: dict[str, Any] = {}
    kinds = [kind for kind in KINDS if f"{kind}0" in functions]
    with (
        running_site(folder, functions, layer, idle_s=IDLE_S, zygotes_mib=16384) as (port, _),
        console.status("cold starts"),
    ):
        time.sleep(1.0 + (0.5 if "fastapi" in kinds else 0.05) * number)  # until all deployments have ended
        for kind in kinds:
            first = [first_byte_ms(port, f"/fn/{kind}{index}/") for index in range(number)]
            time.sleep(IDLE_S + 1.0)  # until all are scaled to zero
            again = [first_byte_ms(port, f"/fn/{kind}{index}/") for index in range(number)]
            results[f"{kind}, first request after its deployment"] = percentiles(first)
            results[f"{kind}, scaled to zero"] = percentiles(again)
    with (
        running_site(folder, functions, layer, idle_s=IDLE_S, zygotes_mib=0) as (port, _),
        console.status("without zygotes"),
    ):
        time.sleep((0.6 if "fastapi" in kinds else 0.05) * number + 3.0)  # until all zygotes are evicted
        for kind in kinds:
            nothing = [first_byte_ms(port, f"/fn/{kind}{index}/") for index in range(number)]
            results[f"{kind}, nothing in memory"] = percentiles(nothing)
    return results


def write_function(folder: Path, name: str, source: str) -> None:
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src/entry.py").write_text(source)
    manifest = f'name = "{name}"\nmain = "src/entry.py"\n' + ('[ai]\nbinding = "AI"\n' if name == "chat" else "")
    (folder / "wrangler.toml").write_text(manifest)


@contextmanager
def running_site(
    folder: Path, functions: dict[str, str], layer: Path | None, *, idle_s: float, zygotes_mib: int
) -> Iterator[tuple[int, int]]:
    """Run a site; yield its port, and the tier of isolation that it has reached."""
    (port,) = free_ports(1)
    lines = [
        'name = "bench"', 'place = { city = "here", latitude = 0.0, longitude = 0.0 }', f"listen = {{ port = {port} }}",
        "[[models]]", 'name = "ember"', 'source = "embedded:ember"', "[functions]", f'state_dir = "{folder / "state"}"', f"idle_s = {idle_s}",
        f"zygotes_mib = {zygotes_mib}", "cpu_ms = 1000", "blocked_s = 1.0",
    ]  # fmt: skip
    for name, source in functions.items():
        write_function(folder / name, name, source)
        lines += ["[[functions.serve]]", f'name = "{name}"', f'path = "{folder / name}"']
        if "fastapi" in name:
            lines.append(f'layer = "{layer}"')
    file = folder / "site.toml"
    file.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([sys.executable, "-m", "pilotlight.runtime", str(file)], stderr=subprocess.DEVNULL)
    try:
        yield port, _ready(port, process)
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder / "state", ignore_errors=True)


def _ready(port: int, process: "subprocess.Popen[bytes]") -> int:
    """Wait until the site is ready; return its isolation tier."""
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            readiness = connection.getresponse()
            readiness.read()
            if readiness.status == 200:
                connection.request("GET", "/status")
                return int(json.load(connection.getresponse())["functions"]["isolation_tier"])
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit("the site did not become ready")


def first_byte_ms(port: int, path: str) -> float:
    """Return the time from the request's first byte to the answer's first byte, on an open connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
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
    """Time calls of a function and of a route of the site, taking turns on one connection."""
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


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("what", "p50 ms", "p95", "p99", "max", "target", box=None, header_style="bold")

    def row(name: str, values: dict[str, float], target: float | None = None) -> None:
        cells = [f"{values[key]:.2f}" for key in ("p50", "p95", "p99", "max")]
        table.add_row(name, *cells, "" if target is None else f"{target:g}")

    for name, values in results.get("cold_ms", {}).items():
        row(f"cold: {name}", values, TARGETS[name.partition(",")[0]])
    for name, values in results.get("warm_ms", {}).items():
        row(f"warm: {name}", values)
    for name in ("function", "route") if "first_token_ms" in results else ():
        row(f"first token: {name}", results["first_token_ms"][name])
    for each in results.get("rates", ()):
        row(f"{each['requests_per_s']:,.0f} requests/s: {each['server']} ({each['failed']} failed)", each["latency_ms"])
    console.print(table)
    if "hostile" in results:
        console.print(beside_table(results["hostile"]))
    if "warm_ms" in results:
        console.print(
            f"warm overhead p50 {results['warm_overhead_p50_ms']:.3f} ms (target {TARGETS['warm overhead']:g})"
        )
    if "first_token_ms" in results:
        console.print(f"delay of the first token, p50: {results['first_token_ms']['added_p50_ms']:.3f} ms (target 5)")


def beside_table(results: dict[str, Any]) -> Table:
    names = ("a function beside one that", "quiet p99", "beside p99", "ratio", "ratios by round", "max", "lost")
    table = Table(*names, box=None, header_style="bold")
    for row in results["rows"]:
        figures = (f"{row[key]:.2f}" for key in ("quiet_p99_ms", "beside_p99_ms", "ratio"))
        each = " ".join(f"{one['ratio']:.2f}" for one in row["rounds"])
        most = max(one["beside"]["latency_ms"]["max"] for one in row["rounds"])
        table.add_row(row["beside"], *figures, each, f"{most:.1f}", str(row["lost"]))
    return table


if __name__ == "__main__":
    main()
