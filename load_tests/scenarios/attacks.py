"""The effect of attacks on other clients. `make bench-attacks` runs it.

python -m load_tests.scenarios.attacks

Each attack runs for a few seconds against the router (and so against its sites), followed by well-formed requests of the same number and size.
Meanwhile another client requests /livez from the router and a site: its p99 may be at most three times that under the well-formed traffic, and memory
must be bounded.
"""

import argparse
import asyncio
import sys
import urllib.request
from collections import Counter
from statistics import quantiles
from typing import Any, NamedTuple

import orjson
from rich.console import Console
from rich.table import Table

from load_tests.attacks import CASES, Attack, Neighbour, send, well_formed
from load_tests.local_network import LocalNetwork
from load_tests.records import write_record

AT_MOST = 3.0
NOTICED_MS = 20.0  # a person does not notice a shorter delay, so it is allowed at any ratio
MAY_GROW_MIB = 256.0


class Outcome(NamedTuple):
    """The figures of one attack, or of its well-formed counterpart, at router or site."""

    sent: int
    num_bytes: int
    answers: "Counter[int]"
    waits_ms: list[float]  # the neighbour's latencies
    most_rss_mib: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console = Console()
    rows = []
    with LocalNetwork() as network:
        for attack in CASES:
            if options.only in attack.name:
                with console.status(attack.name):
                    rows.append(asyncio.run(compare(network, attack, options.seconds)))
    show(console, rows)
    if not options.no_record:
        console.print(f"Record: {write_record('attacks', {'seconds': options.seconds, 'rows': rows})}", soft_wrap=True)
    return 1 if any(row["wrong"] for row in rows) else 0


async def compare(network: LocalNetwork, attack: Attack, seconds: float) -> dict[str, Any]:
    request = attack.request(network.url.removeprefix("http://"))
    attacked = await measured(network, request, 10**6, seconds)
    plain = Attack("plain", lambda: well_formed(len(request))).request(network.url.removeprefix("http://"))
    beside = await measured(network, plain, max(1, attacked[0].sent), seconds)
    row: dict[str, Any] = {"attack": attack.name, "sent": attacked[0].sent, "bytes": attacked[0].num_bytes, "wrong": []}
    row["answers"] = {str(status): count for status, count in attacked[0].answers.items()}
    row["beside"] = {str(status): count for status, count in beside[0].answers.items()}
    if odd := set(attacked[0].answers) - attack.answers:
        row["wrong"].append(f"answered with {sorted(odd)}")
    for where, mine, other in zip(("router", "site"), attacked, beside, strict=True):
        p99, base = percentile_99(mine.waits_ms), percentile_99(other.waits_ms)
        row[where] = {
            "p99_ms": p99,
            "beside_p99_ms": base,
            "max_ms": round(max(mine.waits_ms), 1),
            "rss_mib": round(mine.most_rss_mib, 1),
        }
        if p99 > max(AT_MOST * base, NOTICED_MS):
            row["wrong"].append(f"{where}: /livez p99 {p99:g} ms beside {base:g} ms")
        if mine.most_rss_mib > other.most_rss_mib + MAY_GROW_MIB:
            row["wrong"].append(f"{where}: {mine.most_rss_mib:.0f} MiB beside {other.most_rss_mib:.0f} MiB")
    return row


async def measured(network: LocalNetwork, request: bytes, count: int, seconds: float) -> tuple[Outcome, Outcome]:
    """Send a request `count` times to the router; measure the neighbours of router and site meanwhile."""
    name = next(iter(network.site_urls))
    site, router = network.site_urls[name], network.url
    async with Neighbour(router, (_router_pid(network),)) as there, Neighbour(site, (network.pid(name),)) as here:
        sent, answers = await send(router, request, count, seconds)
        await asyncio.sleep(0.3)
    found = [Outcome(sent, sent * len(request), answers, each.waits_ms, each.most_rss_mib) for each in (there, here)]
    return found[0], found[1]


def _router_pid(network: LocalNetwork) -> int:
    with urllib.request.urlopen(f"{network.url}/status", timeout=10) as answer:
        return int(orjson.loads(answer.read())["process"]["pid"])


def percentile_99(values: list[float]) -> float:
    return round(quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0], 2)


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(
        "attack",
        "sent",
        "answers",
        "router p99 ms",
        "beside",
        "site p99 ms",
        "beside",
        "wrong",
        box=None,
        header_style="bold",
    )
    for row in rows:
        router, site = row["router"], row["site"]
        figures = (router["p99_ms"], router["beside_p99_ms"], site["p99_ms"], site["beside_p99_ms"])
        answers = " ".join(f"{status}x{count}" for status, count in row["answers"].items())
        table.add_row(row["attack"], str(row["sent"]), answers, *map(str, figures), "; ".join(row["wrong"]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
