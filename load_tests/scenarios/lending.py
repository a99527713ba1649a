"""The effect of lending on the first tokens of a slow site. `make bench-lending` runs it, as root.

python -m load_tests.scenarios.lending

Two sites compute SmolLM2 135M in separate network namespaces, with a limited link between them. The slow site's engine host gets a quarter of a
core, the fast one's a whole core, and the fast site lends. Drawn traces come once with lending and once without, in turns, each time as new tenants:
bursts of prompts at the slow site while the fast one is idle, balanced load at both, and bursts while the fast site is busy itself. Then bursts
come over links of other bandwidths and distances. The table compares first tokens, and the predictions in the route header with the measured times.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from load_tests.faults.links import in_own_namespace
from load_tests.lending_sites import BORROWER, LENDER, Asked, Heard, LendingSites, bursts, steady, tie_margin
from load_tests.records import commit, percentiles, write_record

MODULE = "load_tests.scenarios.lending"
MBIT_PER_S = 1000.0
MAP = (
    (100.0, 0.0),
    (300.0, 0.0),
    (1000.0, 0.0),
    (10_000.0, 0.0),
    (300.0, 0.05),
    (1000.0, 0.2),
)  # Mbit/s, round trip in seconds
KINDS = ("bursts, lender idle", "balanced load", "bursts, lender busy")


SETTLED_S = 1.5  # a site learns within a second that another one is idle


class Pair(NamedTuple):
    """A trace with its answers without and with lending."""

    trace: Sequence[Asked]
    alone: list[Heard]
    lending: list[Heard]

    @property
    def margins(self) -> list[float]:
        """Return how far from a tie each answer was that differs."""
        found = [tie_margin(one, other) for one, other in zip(self.alone, self.lending, strict=True)]
        return [margin for margin in found if margin is not None]

    @property
    def errors(self) -> list[str]:
        return [heard.error for heard in (*self.alone, *self.lending) if heard.error]


def main() -> None:
    in_own_namespace(MODULE, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that sites and cgroups are cleaned up
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="file of the model; by default the packaged SmolLM2")
    parser.add_argument("--traces", type=int, nargs=3, default=(20, 5, 5), metavar="N", help="traces of each kind")
    parser.add_argument("--map-traces", type=int, default=3, help="bursts for each link of the map; 0: no map")
    parser.add_argument("--slow-share", type=float, default=0.25, help="share of a core of the slow site's engine host")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    results: dict[str, Any] = {"slow_share": options.slow_share, "seed": options.seed, "kinds": rows, "map": []}
    with LendingSites(options.model, options.slow_share, MBIT_PER_S) as sites:
        rates = asyncio.run(_rates(sites))
        results["prompt_tokens_per_s"] = rates
        for kind, count in zip(KINDS, options.traces, strict=True):
            pairs = [
                _pair(sites, kind, options.seed * 1000 + number, rates, number, console) for number in range(count)
            ]
            rows += [_row(kind, pairs)] if pairs else []
            show(console, results)
        results["open_work_at_end"] = sites.until_idle()
    for mbit_per_s, rtt_s in MAP if options.map_traces else ():
        with LendingSites(options.model, options.slow_share, mbit_per_s, rtt_s) as sites:
            rates = asyncio.run(_rates(sites))
            pairs = [
                _pair(sites, KINDS[0], options.seed * 1000 + number, rates, number, console)
                for number in range(options.map_traces)
            ]
            name = f"{mbit_per_s:g} Mbit/s, {1e3 * rtt_s:g} ms"
            results["map"].append(_row(name, pairs) | {"measured": sites.status(), "prompt_tokens_per_s": rates})
            show(console, results)
    results["load_average"] = [round(value, 1) for value in os.getloadavg()]
    if not options.no_record and not commit().endswith("+"):
        console.print(f"Record: {write_record('lending', results)}", soft_wrap=True)


async def _rates(sites: LendingSites) -> dict[str, float]:
    """Return tokens/s of a prompt of 1,500 tokens at each site.

    The second prompt counts, because the first one includes work that is done once."""
    found, draw = {}, random.Random(0)
    for site in (BORROWER, LENDER):
        for _ in range(2):
            prompt = [draw.randrange(1000, 40_000) for _ in range(1500)]
            (heard,) = await sites.play([Asked(0.0, site, prompt, {"temperature": 0})], lends=False)
            found[site] = round(len(prompt) / heard.ttft_s, 1)
    return found


def _pair(sites: LendingSites, kind: str, seed: int, rates: dict[str, float], number: int, console: Console) -> Pair:
    trace = _trace(kind, random.Random(seed), rates)
    answers = {}
    for lends in (False, True) if number % 2 else (True, False):
        time.sleep(SETTLED_S)
        answers[lends] = asyncio.run(sites.play(trace, lends=lends))
        left = sites.until_idle()
        assert not left, left
    pair = Pair(trace, answers[False], answers[True])
    _log(console, kind, pair)
    return pair


def _trace(kind: str, draw: random.Random, rates: dict[str, float]) -> list[Asked]:
    if kind == "balanced load":  # both are busy half of the time
        return [asked for site, rate in rates.items() for asked in steady(draw, site, 20.0, 0.5 * rate)]
    trace = bursts(draw, 1, 0.0)
    if kind == "bursts, lender busy":
        trace += steady(draw, LENDER, 20.0, 0.8 * rates[LENDER])
    return trace


def _row(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Summarize pairs; ratios above 1 are gains of lending.

    `ratio_slowest_of_traces` compares the longest waits of each trace.
    """
    row: dict[str, Any] = {"name": name, "traces": len(pairs)}
    for site in (BORROWER, LENDER):
        both = [
            (pair.alone[i].ttft_s, pair.lending[i].ttft_s)
            for pair in pairs
            for i, asked in enumerate(pair.trace)
            if asked.site == site
        ]
        if not both:
            continue
        alone, lending = percentiles([one for one, _ in both]), percentiles([other for _, other in both])
        slowest = [_slowest(pair, site) for pair in pairs if any(asked.site == site for asked in pair.trace)]
        row[site] = {
            "requests": len(both),
            "alone_s": alone,
            "lending_s": lending,
            "ratio_p50": round(alone["p50"] / lending["p50"], 2),
            "ratio_p95": round(alone["p95"] / lending["p95"], 2),
            "ratio_slowest_of_traces": {
                "median": round(statistics.median(slowest), 2), "least": round(min(slowest), 2), "n": len(slowest),
            },
        }  # fmt: skip
    lent = [heard for pair in pairs for heard in pair.lending if heard.is_lent]
    num_borrowers = row[BORROWER]["requests"]
    row["share_lent"] = round(len(lent) / num_borrowers, 2)
    errors = [heard.ttft_s / heard.predicted_s[LENDER] for heard in lent if LENDER in heard.predicted_s]
    row["measured_over_predicted"] = percentiles(errors) if errors else None
    margins = [margin for pair in pairs for margin in pair.margins]
    row["different"], row["farthest_from_tie"] = len(margins), max(margins, default=None)
    row["errors"] = [error for pair in pairs for error in pair.errors]
    return row


def _slowest(pair: Pair, site: str) -> float:
    """Return the ratio of a trace's longest waits for a first token: without lending to with it."""
    places = [i for i, asked in enumerate(pair.trace) if asked.site == site]
    return max(pair.alone[i].ttft_s for i in places) / max(pair.lending[i].ttft_s for i in places)


def _log(console: Console, kind: str, pair: Pair) -> None:
    for asked, alone, lending in zip(pair.trace, pair.alone, pair.lending, strict=True):
        line = (
            f"{asked.site} {len(asked.prompt)} tokens at {asked.at_s:.1f}: {alone.ttft_s:.1f} s, {lending.ttft_s:.1f} s"
        )
        console.print(
            f"{line}; {lending.route} {alone.error} {lending.error}", style="dim", markup=False, soft_wrap=True
        )
    console.print(
        f"{kind}: slowest {_slowest(pair, BORROWER):.2f}, different by {pair.margins}, load {os.getloadavg()[0]:.1f}"
    )


def show(console: Console, results: dict[str, Any]) -> None:
    titles = (
        "requests",
        "p50 s",
        "with",
        "ratio",
        "p95 s",
        "with",
        "ratio",
        "lent",
        "measured / predicted",
        "other tokens",
    )
    table = Table("first token", *titles, box=None, header_style="bold")
    for row in (*results["kinds"], *results["map"]):
        for site in (BORROWER, LENDER):
            if site not in row:
                continue
            found, error = row[site], row["measured_over_predicted"]
            alone, lending = found["alone_s"], found["lending_s"]
            is_first = site == BORROWER
            table.add_row(
                f"{row['name']}: {site}", str(found["requests"]), f"{alone['p50']:.1f}", f"{lending['p50']:.1f}", f"{found['ratio_p50']:.2f}",
                f"{alone['p95']:.1f}", f"{lending['p95']:.1f}", f"{found['ratio_p95']:.2f}", f"{row['share_lent']:.0%}" if is_first else "",
                f"{error['p50']:.2f}, p95 {error['p95']:.2f}" if error and is_first else "", str(row["different"]) if is_first else "",
                f"{row['farthest_from_tie']:.3f}" if is_first and row["different"] else "",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
