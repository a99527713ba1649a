"""Times from `pilotlight up` to ready, and from a request to its first token. `make bench` runs it.

python -m load_tests.scenarios.start_up

Each run starts a router, three sites and their engines with files in the page cache, and sends a first request. Then it sends questions with uncached
prompts, one after another. A first run is not counted: it compiles the modules that have changed, and fills the page cache. Targets: ready within
10 s, first token within 150 ms.
"""

import argparse
import asyncio
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from load_tests.client import StreamTimes, stream_chat
from load_tests.local_network import LocalNetwork
from load_tests.records import spread, write_record

CITIES = ("Lisbon", "Tokyo", "Nairobi", "Oslo", "Lima", "Toronto", "Madrid", "Cairo", "Seoul", "Vienna")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args()
    console = Console()
    ready_s: list[float] = []
    first: list[StreamTimes] = []
    later: list[StreamTimes] = []
    with console.status("a run that is not counted"), LocalNetwork():
        pass
    for run in range(options.runs):
        with console.status(f"run {run + 1} of {options.runs}"), LocalNetwork() as network:
            ready_s.append(network.ready_s)
            times = asyncio.run(ask(network.url, options.requests + 1))
            first.append(times[0])
            later += times[1:]
    results = summarise(ready_s, first, later)
    show(console, results)
    console.print(f"Record: {write_record('start-up', results)}", soft_wrap=True)


async def ask(url: str, count: int) -> list[StreamTimes]:
    times = []
    async with aiohttp.ClientSession() as session:
        for index in range(count):
            question = f"Question {index}: what is the airport code of {CITIES[index % len(CITIES)]}?"
            body = {"model": "ember", "max_tokens": 40, "messages": [{"role": "user", "content": question}]}
            times.append(await stream_chat(session, url, body))
    failed = [time.error for time in times if not time.finished or time.ttft_s is None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return times


def summarise(ready_s: list[float], first: list[StreamTimes], later: list[StreamTimes]) -> dict[str, Any]:
    return {
        "ready_s": spread(ready_s),
        "ttft_first_request_ms": spread([time.ttft_s * 1e3 for time in first if time.ttft_s is not None], 1),
        "ttft_ms": spread([time.ttft_s * 1e3 for time in later if time.ttft_s is not None], 1),
        "tpot_ms": spread([tpot_ms(time) for time in later if len(time.arrivals_s) > 1], 2),
        "targets": {"ready_s": 10.0, "ttft_first_request_ms": 150.0},
    }


def tpot_ms(times: StreamTimes) -> float:
    """Return the time per output token after the first, by the server's count of tokens."""
    assert times.ttft_s is not None
    return 1e3 * (times.e2el_s - times.ttft_s) / max(1, int(times.usage["completion_tokens"]) - 1)


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("measure", "median", "min", "max", "n", "target", box=None, header_style="bold")
    for name, value in results.items():
        if name != "targets":
            target = results["targets"].get(name, "")
            table.add_row(name, *(str(value[key]) for key in ("median", "min", "max", "n")), str(target))
    console.print(table)


if __name__ == "__main__":
    main()
