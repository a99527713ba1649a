"""The effect of lending on the first tokens of a slow site. `make bench-lending` runs it, as root.

python -m load_tests.scenarios.lending

Sites compute SmolLM2 135M in separate network namespaces, with limited links between them. The slow site's engine host gets a quarter of a core, the
lender's most of one. Drawn traces come once with lending and once without, in turns, each time as new tenants: bursts of prompts at the slow site
while the lender is idle, balanced load at both, and bursts while the lender is busy itself. Then bursts come to a site with two lenders. The map has
bursts over links of other bandwidths and distances, also for a model with five times as many KV bytes per token (random weights of a 0.5B shape). The
table compares first tokens, and the predictions in the route header with the measured times.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from load_tests.faults.links import in_own_namespace
from load_tests.lending_sites import (
    BORROWER,
    GREEDY,
    LENDER,
    LENDERS,
    Asked,
    Heard,
    LendingSites,
    bursts,
    drawn_tokens,
    steady,
    tie_margin,
)
from load_tests.random_checkpoint import Shape, write
from load_tests.records import commit, percentiles, write_record

MODULE = "load_tests.scenarios.lending"
MBIT_PER_S = 1000.0
WIDE = Shape(1024, 4096, layers=28, heads=16, kv_heads=16, head_dim=64)  # 112 KiB of KV cache per token
# Mbit/s, round trip in seconds, share of lost packets
MAP = (
    (100.0, 0.0, 0.0),
    (300.0, 0.0, 0.0),
    (1000.0, 0.0, 0.0),
    (10_000.0, 0.0, 0.0),
    (1000.0, 0.05, 0.0),
    (1000.0, 0.2, 0.0),
    (1000.0, 0.05, 0.01),
)
KINDS = ("bursts, lender idle", "balanced load", "bursts, lender busy")
SECOND_SHARE = 0.5  # share of a core of the second lender's engine host

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
    parser.add_argument("--traces", type=int, nargs=3, default=(12, 4, 4), metavar="N", help="traces of each kind")
    parser.add_argument("--three", type=int, default=6, help="bursts for three sites")
    parser.add_argument("--map-traces", type=int, default=2, help="bursts for each link of the map; 0: no map")
    parser.add_argument(
        "--shares", type=float, nargs=2, default=(0.25, 0.8), help="shares of a core: slow site, lender"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    run, rows, cells = _Run(options.seed, Console()), list[dict[str, Any]](), list[dict[str, Any]]()
    results: dict[str, Any] = {"shares": options.shares, "seed": options.seed, "kinds": rows, "map": cells}
    with LendingSites(options.model, options.shares, MBIT_PER_S) as sites:
        rates = results["prompt_tokens_per_s"] = asyncio.run(_rates(sites))
        for kind, count in zip(KINDS, options.traces, strict=True):
            rows += run.rows(sites, kind, kind, count, rates)
            show(run.console, results)
        results["open_work_at_end"] = sites.until_idle()
    if options.three:
        with LendingSites(options.model, (*options.shares, SECOND_SHARE), MBIT_PER_S) as sites:
            rows += run.rows(sites, "bursts, two lenders idle", KINDS[0], options.three, asyncio.run(_rates(sites)))
            show(run.console, results)
            results["open_work_at_end"] |= sites.until_idle()
    with tempfile.TemporaryDirectory() as folder:
        models = {"SmolLM2 135M": options.model, "wide 0.5B": write(Path(folder), WIDE)} if options.map_traces else {}
        for name, model in models.items():
            for mbit_per_s, rtt_s, loss in MAP:
                with LendingSites(model, options.shares, mbit_per_s, rtt_s, loss) as sites:
                    rates = asyncio.run(_rates(sites))
                    title = f"{name}, {mbit_per_s:g} Mbit/s, {1e3 * rtt_s:g} ms, {loss:.0%} lost"
                    for row in run.rows(sites, title, KINDS[0], options.map_traces, rates):
                        cells.append(row | {"measured": sites.statuses(), "prompt_tokens_per_s": rates})
                    show(run.console, results)
    results["load_average"] = [round(value, 1) for value in os.getloadavg()]
    if not options.no_record and not commit().endswith("+"):
        run.console.print(f"Record: {write_record('lending', results)}", soft_wrap=True)


async def _rates(sites: LendingSites) -> dict[str, float]:
    """Return tokens/s of a prompt of 1,500 tokens at each site.

    The second prompt counts, because the first one includes work that is done once."""
    found, draw = {}, random.Random(0)
    for site in sites.sites:
        for _ in range(2):
            prompt = drawn_tokens(draw, 1500)
            (heard,) = await sites.play([Asked(0.0, site, prompt, GREEDY)], lends=False)
            found[site] = round(len(prompt) / heard.ttft_s, 1)
    return found


class _Run(NamedTuple):
    seed: int
    console: Console

    def rows(
        self, sites: LendingSites, name: str, kind: str, count: int, rates: dict[str, float]
    ) -> list[dict[str, Any]]:
        """Play `count` traces of a kind; return their row, or nothing for none."""
        pairs = [self._pair(sites, kind, number, rates) for number in range(count)]
        return [_row(name, pairs)] if pairs else []

    def _pair(self, sites: LendingSites, kind: str, number: int, rates: dict[str, float]) -> Pair:
        trace = _trace(kind, random.Random(self.seed * 1000 + number), rates)
        answers = {}
        for lends in (False, True) if number % 2 else (True, False):
            time.sleep(SETTLED_S)
            answers[lends] = asyncio.run(sites.play(trace, lends=lends))
            left = sites.until_idle()
            assert not left, left
        pair = Pair(trace, answers[False], answers[True])
        _log(self.console, kind, pair)
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
    for site in (BORROWER, *LENDERS):
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
    row["lent_to"] = {name: sum(heard.lender == name for heard in lent) for name in LENDERS}
    errors = [heard.ttft_s / heard.predicted_s[heard.lender] for heard in lent]
    row["measured_over_predicted"] = percentiles(errors) if errors else None
    here = [
        heard
        for pair in pairs
        for asked, heard in zip(pair.trace, pair.lending, strict=True)
        if asked.site == BORROWER and not heard.is_lent
    ]
    row["lent_s"], row["here_s"] = _medians(lent, lambda each: each.lender), _medians(here, lambda _: "here")
    margins = [margin for pair in pairs for margin in pair.margins]
    row["different"], row["farthest_from_tie"] = len(margins), max(margins, default=None)
    row["errors"] = [error for pair in pairs for error in pair.errors]
    return row


def _medians(heard: Sequence[Heard], chosen: Callable[[Heard], str]) -> dict[str, float] | None:
    """Return the median predicted and measured seconds; None for no prompt.

    `chosen` returns the name of the place that computed a prompt, as in its prediction.
    """
    both = [(each.predicted_s[chosen(each)], each.ttft_s) for each in heard if chosen(each) in each.predicted_s]
    if not both:
        return None
    return {
        name: round(statistics.median(values), 2)
        for name, values in zip(("predicted", "measured"), zip(*both, strict=True), strict=True)
    }


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
        "requests", "p50 s", "with", "ratio", "p95 s", "with", "ratio", "lent", "lent: predicted s", "measured",
        "here: predicted s", "measured", "other tokens", "farthest from a tie",
    )  # fmt: skip
    table = Table("first token", *titles, box=None, header_style="bold")
    for row in (*results["kinds"], *results["map"]):
        for site in (BORROWER, *LENDERS):
            if site not in row:
                continue
            alone, lending = row[site]["alone_s"], row[site]["lending_s"]
            cells = [
                f"{row['name']}: {site}", str(row[site]["requests"]), f"{alone['p50']:.1f}", f"{lending['p50']:.1f}",
                f"{row[site]['ratio_p50']:.2f}", f"{alone['p95']:.1f}", f"{lending['p95']:.1f}", f"{row[site]['ratio_p95']:.2f}",
            ]  # fmt: skip
            if site == BORROWER:
                cells.append(f"{row['share_lent']:.0%}")
                for medians in (row["lent_s"], row["here_s"]):
                    cells += ["", ""] if medians is None else [f"{value:.1f}" for value in medians.values()]
                cells += [str(row["different"]), f"{row['farthest_from_tie']:.3f}" if row["different"] else ""]
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
