"""The effect of hostile functions on a neighbour's latencies, for `make bench-functions`.

A machine's quiet p99 varies by half from minute to minute, so each hostile period follows a quiet one. Figures are the ratio of the two, and its
median over several rounds. Clients should not compete with the site: the measuring one has priority over all other processes if the kernel
permits, and clients of the hostile function run in a separate process.
"""

import asyncio
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

from load_tests.http_load import open_loop, request_of
from load_tests.records import percentiles

GOOD_PER_S = 100.0
AWAKE_S = 8.0  # time after a site's start until all its processes run, the standby host included
MOST_S = 300.0  # limit of all rounds together; periods are shortened to fit
BUSY_S = 0.5  # time for the hostile clients to start and send requests
OVER_S = 1.5  # time after the hostile clients until their last isolate has ended and its memory is released

# A function that fills the kernel's memory for sockets, which is not part of a process's size.
SOCKETS = """
import _socket
held = []
while True:
    pair = _socket.socketpair()
    pair[0].setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 1 << 23)
    pair[0].setblocking(False)
    held.append(pair)
    try:
        while True:
            pair[0].send(bytes(1 << 16))
    except BlockingIOError:
        pass
"""
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
    "fills socket buffers": SOCKETS,
    "fetches without end": "while True:\n    try:\n        await fetch('https://example.invalid/')\n    except Exception:\n        pass",
    "forks when it is imported": "return Response('imported')",
}  # fmt: skip
AT_IMPORT = {
    "forks when it is imported": "for _ in range(4):\n    if os.fork() == 0:\n        while True:\n            pass\n"
}


def hostile_source(name: str) -> str:
    lines = "\n".join(f"        {line}" for line in HOSTILE[name].splitlines())
    before = f"import os, time\nfrom workers import *\n{AT_IMPORT.get(name, '')}"
    return f"{before}class Default(WorkerEntrypoint):\n    async def fetch(self, request):\n{lines}\n"


def hostile_names() -> dict[str, str]:
    return {name: "hostile-" + name.replace(" ", "-") for name in HOSTILE}


def beside_hostile_ones(port: int, good: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure the neighbour in quiet and hostile periods in turn, each of at most `seconds`."""
    names = hostile_names()
    stretch_s = min(seconds, (MOST_S - AWAKE_S) / (rounds * len(names)) / 2 - (BUSY_S + OVER_S) / 2)
    with _first_in_line():
        asyncio.run(open_loop(port, request_of(good), GOOD_PER_S, AWAKE_S))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, function in names.items():
            with _first_in_line():
                quiet = _asked(port, good, stretch_s)
            with _kept_busy(port, f"/fn/{function}/"), _first_in_line():
                beside = _asked(port, good, stretch_s)
            ratio = beside["latency_ms"]["p99"] / quiet["latency_ms"]["p99"]
            found[name].append({"quiet": quiet, "beside": beside, "ratio": round(ratio, 2)})
            time.sleep(OVER_S)
    return {
        "requests_per_s": GOOD_PER_S,
        "stretch_s": round(stretch_s, 2),
        "rows": [summary(name, each) for name, each in found.items()],
    }


def summary(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the rounds, and the rounds themselves."""
    return {
        "beside": name,
        **{f"{which}_p99_ms": median_of(rounds, which, "p99") for which in ("quiet", "beside")},
        "ratio": round(statistics.median(each["ratio"] for each in rounds), 2),
        "lost": sum(each[which]["lost"] for each in rounds for which in ("quiet", "beside")),
        "rounds": rounds,
    }


def median_of(rounds: list[dict[str, Any]], which: str, percentile: str) -> float:
    found: list[float] = [each[which]["latency_ms"][percentile] for each in rounds]
    return round(statistics.median(found), 3)


def _asked(port: int, good: str, seconds: float) -> dict[str, Any]:
    waited_ms, stolen_ms = _waited_ms(), _stolen_ms()
    load = asyncio.run(open_loop(port, request_of(good), GOOD_PER_S, seconds))
    waited_ms = (_waited_ms() - waited_ms) / max(1, len(load.latencies_ms))
    return {
        "latency_ms": percentiles(load.latencies_ms),
        "client_waited_ms": round(waited_ms, 4),
        "stolen_ms": round(_stolen_ms() - stolen_ms),
        "lost": load.failed,
    }


def _waited_ms() -> float:
    """Return how long this thread was runnable but not running.

    The client itself adds this to its latencies.
    """
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6


def _stolen_ms() -> float:
    """Return for how long other virtual machines used this one's cores (steal time), summed over cores."""
    return 1e3 * int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _first_in_line() -> Iterator[None]:
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield  # without priority, client_waited_ms in the record shows the effect
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


@contextmanager
def _kept_busy(port: int, path: str) -> Iterator[None]:
    """Run two clients that send requests without a pause. One of them does not read its answers."""
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    process = context.Process(target=_keep_asking, args=(port, path, started, ended), daemon=True)
    process.start()
    try:
        started.wait(30)
        time.sleep(BUSY_S)
        yield
    finally:
        ended.set()
        process.join(10)


def _keep_asking(port: int, path: str, started: Event, ended: Event) -> None:
    def ask(reads: bool) -> None:
        while not ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as connection:
                    connection.settimeout(1.0)
                    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                    while reads and not ended.is_set() and connection.recv(65536):
                        pass
                    ended.wait(0.05 if reads else 1.0)
            except OSError:
                ended.wait(0.02)

    threads = [threading.Thread(target=ask, args=(reads,)) for reads in (True, False)]
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join()
