"""The latency that a router adds. `make bench-router` runs it.

python -m load_tests.scenarios.router_overhead

Requests go to a site that computes nothing, directly and through each router in turn, for several rounds. Figures are medians over rounds of the
difference to direct requests. Each stream carries 50 tokens a second, and a token's delay counts from the time at which the site wrote it. Client,
site and router share the machine's cores: at high rates each waits for the others, so rates are given per second of the router's processor time as
well as per second of the clock. The cost of each feature is the processor time of a router with its settings beside one without.

Targets: a token of 64 streams is delayed by 1.5 ms at the median and 5 ms at p99, a stream's first token by no more than vllm-router delays it; the
rate is ten times LiteLLM's, and 400 prompts of 220 KB per second and core.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from load_tests.overhead.client import Heard, idle_streams, load, request
from load_tests.overhead.routers import (
    BEFORE,
    KEY,
    NOBODY,
    OURS,
    PEERS,
    TWO_WORKERS,
    Running,
    running,
    running_features,
)
from load_tests.overhead.trivial_site import IDLE
from load_tests.records import write_record
from pilotlight.wire.http.listen import raise_file_limit

KB = 1024
TARGETS = {"token_p50_ms": 1.5, "token_p99_ms": 5.0, "large_per_core": 400.0, "times_litellm": 10.0}


class Task(NamedTuple):
    name: str
    connections: int
    prompt_bytes: int
    tokens: int  # 0 for an answer that is not streamed
    share: float  # share of the time that one measurement takes


TASKS = (
    Task("1 stream", 1, KB, 5, 1.0),
    Task("64 streams", 64, KB, 50, 1.0),
    Task("256 streams", 256, KB, 50, 1.0),
    Task("1 stream, 220 KB", 1, 220 * KB, 5, 0.7),
    Task("requests, 1 connection", 1, KB, 0, 0.5),
    Task("requests, 64 connections", 64, KB, 0, 1.0),
    Task("requests, 220 KB, 16 connections", 16, 220 * KB, 0, 1.0),
)
PRICED = (TASKS[1], TASKS[5])  # tasks in which each feature is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument(
        "--only", default=";".join([OURS, TWO_WORKERS, *PEERS]), help="routers, separated by semicolons"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, for comparison")
    parser.add_argument("--tasks", default="", help="only tasks whose names contain this text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of one measurement")
    parser.add_argument(
        "--idle", type=int, default=9_000, help="streams that are open and silent in the last measurement"
    )
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    raise_file_limit()
    console = Console(width=150)
    tasks = [task for task in TASKS if options.tasks in task.name]
    with running(options.only.split(";"), options.peers.absolute(), before=options.before) as routers:
        versions = {router.name: router.version for router in routers if router.version}
        rounds = uvloop.run(measure(routers, tasks, options.rounds, options.seconds, console))
        ours = next((router for router in routers if router.name == OURS), None)
        idle = uvloop.run(beside_idle(ours, options.idle, options.seconds, console)) if ours and options.idle else None
    with running_features() as featured:
        priced = uvloop.run(measure(featured, PRICED, options.rounds, options.seconds, console))
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "versions": versions,
        "shared_cores": "client, site and router share the machine's cores",
        "targets": TARGETS,
        "beside_idle_streams": idle,
        "rows": [row(task, name, rounds) for task in tasks for name in rounds[0][task.name]],
        "features_cpu_us": {router.name: features_us(router.name, priced) for router in featured},
    }
    if options.before:
        results["ratio_to_before"] = {task.name: ratio_to_before(task, rounds) for task in tasks}
    show(console, results)
    if not options.no_record:
        path = write_record("router-overhead", results, ("aiohttp", "httptools", "hypercorn", "orjson", "uvloop"))
        console.print(f"Record: {path}", soft_wrap=True)


Round = dict[str, dict[str, dict[str, float]]]  # figures by task and router


async def measure(
    routers: Sequence[Running], tasks: Sequence[Task], rounds: int, seconds: float, console: Console
) -> list[Round]:
    """Measure the tasks; routers take turns within each, so that changes of the machine affect all alike."""
    for router in routers:  # warm up connections, caches and branch prediction
        await load(router.url, request(router.url, KEY, KB, 0), 4, 0.3)
    made: list[Round] = []
    for number in range(rounds):
        made.append({task.name: {} for task in tasks})
        for task in tasks:
            for router in routers:
                with console.status(f"round {number + 1} of {rounds}: {task.name}, {router.name}"):
                    raw = request(router.url, KEY, task.prompt_bytes, task.tokens)
                    before = router.cpu_s()
                    heard = await load(router.url, raw, task.connections, seconds * task.share)
                    made[-1][task.name][router.name] = facts(heard, router.cpu_s() - before)
                    await asyncio.sleep(0.1)
    return made


async def beside_idle(router: Running, count: int, seconds: float, console: Console) -> dict[str, float]:
    """Measure the effect of very many silent open streams on 64 active ones."""
    with console.status(f"{count:,} idle streams"):
        before = router.process.memory_info().rss
        async with idle_streams(router.url, request(router.url, KEY, KB, IDLE), count) as started:
            rss = router.process.memory_info().rss
            spent, began = router.cpu_s(), time.perf_counter()
            await asyncio.sleep(seconds)
            idle_share = (router.cpu_s() - spent) / (time.perf_counter() - began)
            heard = await load(router.url, request(router.url, KEY, KB, 50), 64, seconds)
        kept = {key: value for key, value in facts(heard, 0.0).items() if key != "cpu_ms"}
        return {
            "idle": started,
            "cpu_share_while_idle": round(idle_share, 4),
            "kib_each": round((rss - before) / 1024 / max(1, started), 1),
            **kept,
        }


def facts(heard: Heard, cpu_s: float) -> dict[str, float]:
    found = {
        "answers": len(heard.whole_ms),
        "failures": heard.failures,
        "rate": heard.rate,
        "cpu_ms": 1e3 * cpu_s / max(1, len(heard.whole_ms)),
    }
    for name, times in (("whole", heard.whole_ms), ("first", heard.first_ms), ("token", heard.token_ms)):
        if len(times) > 1:
            cuts = quantiles(times, n=100, method="inclusive")
            found |= {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}
    return found


def row(task: Task, name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of one router at one task, with the differences to direct requests."""
    mine = [made[task.name][name] for made in rounds]
    direct = [made[task.name][NOBODY] for made in rounds]
    keys = [key for key in mine[0] if all(key in facts for facts in (*mine, *direct))]
    figures: dict[str, Any] = {key: round(median(facts[key] for facts in mine), 3) for key in keys}
    figures["answers"] = sum(facts["answers"] for facts in mine)
    figures["failures"] = sum(facts["failures"] for facts in mine)
    for key in keys:
        if key.endswith("_p50_ms") or key.endswith("_p99_ms"):
            added = [facts[key] - plain[key] for facts, plain in zip(mine, direct, strict=True)]
            figures[f"added_{key}"] = {
                "median": round(median(added), 3),
                "min": round(min(added), 3),
                "max": round(max(added), 3),
            }
    return {"task": task.name, "router": name, **figures}


def features_us(name: str, rounds: Sequence[Round]) -> dict[str, float]:
    """Return a router's processor time for each answer of each task, in microseconds: medians of rounds."""
    return {task.name: round(1e3 * median(made[task.name][name]["cpu_ms"] for made in rounds), 1) for task in PRICED}


def ratio_to_before(task: Task, rounds: Sequence[Round]) -> dict[str, float]:
    """Return how many times the older router's rates this one has, as medians of rounds."""
    pairs = [(made[task.name][OURS], made[task.name][BEFORE]) for made in rounds]
    return {
        "rate": round(median(now["rate"] / old["rate"] for now, old in pairs), 3),
        "per_core": round(median(old["cpu_ms"] / now["cpu_ms"] for now, old in pairs), 3),
    }


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        "task",
        "router",
        "answers",
        "failed",
        "req/s",
        "per core s",
        "whole p50",
        "p99",
        "first p50",
        "p99",
        "token p50",
        "p99",
        box=None,
    )
    last = ""
    for line in results["rows"]:
        cells = [
            line["task"] if line["task"] != last else "",
            line["router"],
            str(line["answers"]),
            str(line["failures"]),
            f"{line['rate']:,.0f}",
        ]
        cells.append(f"{1e3 / line['cpu_ms']:,.0f}" if line["cpu_ms"] else "")
        is_direct = line["router"] == NOBODY
        for kind in ("whole", "first", "token"):
            for percent in ("p50", "p99"):
                if f"{kind}_{percent}_ms" not in line:
                    cells.append("")
                elif is_direct:
                    cells.append(f"{line[f'{kind}_{percent}_ms']:.2f}")
                else:
                    cells.append(f"{line[f'added_{kind}_{percent}_ms']['median']:+.2f}")
        table.add_row(*cells)
        last = line["task"]
    console.print(table)
    console.print_json(data=results["features_cpu_us"])
    if results["beside_idle_streams"]:
        console.print_json(data=results["beside_idle_streams"])
    for task, ratios in results.get("ratio_to_before", {}).items():
        console.print(f"{task}: {ratios['rate']:.3f} of before, {ratios['per_core']:.3f} per second of processor time")
    console.print("Milliseconds: the total without a router, the added time with one.", style="dim")


if __name__ == "__main__":
    main()
