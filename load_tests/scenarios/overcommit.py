"""Thirteen models on a device with room for a quarter: are all requests answered, and how late?

python -m load_tests.scenarios.overcommit

Open loop: requests arrive at random times for models drawn from Zipf's law. The same sequence runs twice: with the small budget, and with every model
awake all the time.
"""

import argparse
import asyncio
import random
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from load_tests.client import StreamTimes, stream_chat
from load_tests.random_checkpoint import EMBER
from load_tests.records import write_record
from load_tests.site_process import SiteProcess

GIB = 1 << 30


class Arrival(NamedTuple):
    at_s: float
    model: str
    question: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=13)
    parser.add_argument("--share", type=float, default=0.25, help="the share of all weights that may be awake")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--per-second", type=float, default=3.0)
    parser.add_argument("--source", type=Path, default=EMBER)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    console = Console()
    names = [f"m{i:02}" for i in range(options.models)]
    arrivals = zipf_arrivals(names, options.requests, options.per_second, options.seed)
    results: dict[str, Any] = {
        key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()
    }
    with console.status("every model awake"):
        size, resident = run(options, names, arrivals, "device", None)
    budget_gib = options.share * options.models * size / GIB
    with console.status(f"room for {options.share:.0%}"):
        _, crowded = run(options, names, arrivals, "auto", budget_gib)
    results |= {
        "weights_bytes_each": size,
        "weights_gib": budget_gib,
        "always_awake": resident,
        "over_committed": crowded,
    }
    show(console, results)
    console.print(f"Record: {write_record('overcommit', results)}", soft_wrap=True)
    return int(crowded["failed"] + resident["failed"] > 0)


def zipf_arrivals(names: list[str], count: int, per_second: float, seed: int) -> list[Arrival]:
    chance = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    now, arrivals = 0.0, []
    for number in range(count):
        now += chance.expovariate(per_second)
        (model,) = chance.choices(names, weights)
        arrivals.append(Arrival(now, model, f"Question {number}: what is the airport code of Lisbon?"))
    return arrivals


def run(
    options: argparse.Namespace, names: list[str], arrivals: list[Arrival], residency: str, budget_gib: float | None
) -> tuple[int, dict[str, Any]]:
    """Return the bytes of one model's weights, and the measurements."""
    engine = {"threads": options.threads, "kv_gib": 0.25, "standby": False, "weights_gib": budget_gib}
    models = [{"name": name, "source": str(options.source), "residency": residency} for name in names]
    with SiteProcess("bench-overcommit", engine, models) as site:
        site.until(lambda: site.get("/readyz")["status"] == "ready", "the site is ready")
        for name in names:  # load each once from disk, as at a site that has been up for a while
            site.ask({"model": name, "prompt": [3, 4, 5], "max_tokens": 1})
        before = counts(site)
        times = asyncio.run(ask(f"http://127.0.0.1:{site.port}", arrivals))
        found = site.get("/status")["models"]
        wakes, evictions = (after - then for after, then in zip(counts(site), before, strict=True))
    ttft_ms = sorted(1e3 * time.ttft_s for time in times if time.ttft_s is not None)
    failed = [time.error or f"status {time.status}" for time in times if not time.finished or time.error]
    return max(model["weights_bytes"] for model in found), {
        "answered": len(times) - len(failed),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "ttft_ms": {f"p{q}": round(quantile(ttft_ms, q / 100), 1) for q in (50, 90, 99)},
        "wakes": wakes,
        "evictions": evictions,
        "wake_ms_median": round(statistics.median(model["wake_ms"] for model in found), 1),
    }


def counts(site: SiteProcess) -> tuple[int, int]:
    models = site.get("/status")["models"]
    return sum(model["wakes"] for model in models), sum(model["evictions"] for model in models)


async def ask(url: str, arrivals: list[Arrival]) -> list[StreamTimes]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    connector = aiohttp.TCPConnector(limit=0)

    async def one(session: aiohttp.ClientSession, arrival: Arrival) -> StreamTimes:
        await asyncio.sleep(began + arrival.at_s - loop.time())
        messages = [{"role": "user", "content": arrival.question}]
        return await stream_chat(session, url, {"model": arrival.model, "max_tokens": 16, "messages": messages})

    async with aiohttp.ClientSession(connector=connector) as session:
        return await asyncio.gather(*(one(session, arrival) for arrival in arrivals))


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("", "every model awake", f"room for {results['share']:.0%}", box=None, header_style="bold")
    sides = [results["always_awake"], results["over_committed"]]
    table.add_row("answered", *(f"{side['answered']} of {results['requests']}" for side in sides))
    for quantile_name in ("p50", "p90", "p99"):
        table.add_row(f"TTFT {quantile_name}, ms", *(f"{side['ttft_ms'][quantile_name]:,.1f}" for side in sides))
    table.add_row("wakes", *(str(side["wakes"]) for side in sides))
    table.add_row("put to sleep", *(str(side["evictions"]) for side in sides))
    table.add_row("a model's last wake, median ms", *(f"{side['wake_ms_median']:,.1f}" for side in sides))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
