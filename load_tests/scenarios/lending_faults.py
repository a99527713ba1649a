"""The effect on lent prompts of a fault at either site. `make bench-lending-faults` runs it, as root.

python -m load_tests.scenarios.lending_faults

A slow site and its lender (load_tests/lending_sites.py). For each case a burst of prompts arrives at the slow site. At a random moment after the
first prompt is lent, an engine host is killed, an engine host or a whole site is stopped for some seconds, or the link is starved or loses every
packet. Each text must be that of an undisturbed run without lending, unless its tokens were nearly a tie there. Afterwards neither site may have open
work. With `--resume FILE` each case is kept in the file, and a further run continues after the last one.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from load_tests.faults.links import in_own_namespace
from load_tests.lending_sites import (
    BORROWER,
    GREEDY,
    LENDER,
    Asked,
    Heard,
    LendingSites,
    drawn_prompt,
    drift,
    tie_margin,
)
from load_tests.records import commit, write_record

MODULE = "load_tests.scenarios.lending_faults"
MBIT_PER_S, NEARLY_NOTHING_MBIT_PER_S = 1000.0, 0.05
HELD_S = (0.5, 8.0)  # least and most seconds of a stop, or of a link with nothing or nearly nothing
HOWS = ("kill the engine host", "stop the engine host", "stop the site", "starve the link", "cut the link")
PROMPTS = 4
TRACES = 10  # different bursts; each comes once undisturbed, and then to many cases as new tenants
SETTLED_S = 1.5  # the borrower learns within a second that the lender is idle
# An answer with other tokens is right if the two likeliest ones were nearer to each other than this many times the largest drift: the difference of
# log-probabilities between equal answers. They drift because sums of other chunks are rounded differently.
TIE_IN_DRIFTS = 2.0


class Case(NamedTuple):
    """A drawn fault."""

    site: str
    how: str
    after_s: float  # seconds after the first prompt was lent
    held_s: float
    trace: int


def drawn(draw: random.Random) -> Case:
    held_s = HELD_S[0] * (HELD_S[1] / HELD_S[0]) ** draw.random()
    return Case(draw.choice((BORROWER, LENDER)), draw.choice(HOWS), 3.0 * draw.random(), held_s, draw.randrange(TRACES))


def drawn_trace(draw: random.Random) -> list[Asked]:
    return [Asked(0.3 * draw.random(), BORROWER, drawn_prompt(draw, 300, 900), GREEDY) for _ in range(PROMPTS)]


def main() -> int:
    in_own_namespace(MODULE, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that sites and cgroups are cleaned up
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="file of the model; by default the packaged SmolLM2")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=240.0, help="minutes after which no further case starts")
    parser.add_argument(
        "--shares", type=float, nargs=2, default=(0.25, 0.8), help="shares of a core: slow site, lender"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="append each case, and skip cases that it has")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, rows = Console(), kept_cases(options.resume, options.seed)
    ends_at = time.monotonic() + 60 * options.minutes
    expected: dict[int, list[Heard]] = {}
    while len(rows) < options.cases and time.monotonic() < ends_at:
        with LendingSites(options.model, options.shares, MBIT_PER_S, dtype="float32") as sites:
            cases, is_fresh = _Cases(sites, options.seed, expected), True
            while len(rows) < options.cases and time.monotonic() < ends_at:
                row = cases.run(len(rows))
                console.print(f"{len(rows)}: {row}", soft_wrap=True, markup=False)
                if not (row["hit"] or is_fresh):  # after some faults the borrower expects too little: start anew
                    break
                is_fresh = False
                rows.append(row)
                if options.resume is not None:
                    with options.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row | {"seed": options.seed}) + "\n")
    results = {
        "cases": len(rows),
        "by_fault": {
            f"{how}, {site}": sum((row["how"], row["site"]) == (how, site) for row in rows)
            for how in HOWS for site in (BORROWER, LENDER)
        },
        "hit": sum(row["hit"] for row in rows),
        "lent": sum(row["lent"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "different": sum(len(row["margins"]) for row in rows),
        "farthest_from_tie": max((margin for row in rows for margin in row["margins"]), default=None),
        "largest_drift": max((row["drift"] for row in rows), default=0.0),
        "left_open": [row["left_open"] for row in rows if row["left_open"]],
        "rows": rows,
    }  # fmt: skip
    console.print({name: value for name, value in results.items() if name != "rows"})
    if not options.no_record and not commit().endswith("+"):
        console.print(f"Record: {write_record('lending-faults', results)}", soft_wrap=True)
    is_other = (results["farthest_from_tie"] or 0.0) > TIE_IN_DRIFTS * results["largest_drift"]
    return int(bool(is_other or results["failed"] or results["left_open"]))


def kept_cases(path: Path | None, seed: int) -> list[dict[str, Any]]:
    """Return the cases in a file of `--resume`, in their order."""
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.pop("seed") == seed]


class _Cases:
    def __init__(self, sites: LendingSites, seed: int, expected: dict[int, list[Heard]]) -> None:
        """Prepare cases at sites that have just started.

        `expected` gets each trace's undisturbed answers without lending.
        """
        warming = [Asked(0.0, site, drawn_prompt(random.Random(site), 500, 700), GREEDY) for site in sites.sites]
        asyncio.run(sites.play(warming, lends=False))  # a site that has computed nothing has no rate to predict with
        self._sites = sites
        self._seed = seed
        self._expected = expected

    def run(self, number: int) -> dict[str, Any]:
        case = drawn(random.Random(self._seed * 1000 + number))
        trace = drawn_trace(random.Random(f"{self._seed} trace {case.trace}"))
        self._sites.until_whole()
        if case.trace not in self._expected:
            self._expected[case.trace] = asyncio.run(self._sites.play(trace, lends=False))
            self._sites.until_idle()
        return _disturb(self._sites, case, trace, self._expected[case.trace])


def _disturb(sites: LendingSites, case: Case, trace: Sequence[Asked], expected: Sequence[Heard]) -> dict[str, Any]:
    time.sleep(SETTLED_S)
    heard, hit = asyncio.run(_disturbed(sites, case, trace))
    left = sites.until_idle()
    margins = [tie_margin(other, each) for each, other in zip(heard, expected, strict=True) if not each.error]
    return {
        "site": case.site, "how": case.how, "after_s": round(case.after_s, 2), "held_s": round(case.held_s, 1), "hit": hit,
        "lent": sum(each.is_lent for each in heard),
        "margins": [margin for margin in margins if margin is not None],
        "drift": max(drift(other, each) for each, other in zip(heard, expected, strict=True)),
        "failed": sum(bool(each.error) for each in heard),
        "errors": sorted({each.error for each in heard if each.error}),
        "left_open": left,
        "slowest_s": [round(max(each.ttft_s for each in some), 1) for some in (expected, heard)],
    }  # fmt: skip


async def _disturbed(sites: LendingSites, case: Case, trace: Sequence[Asked]) -> tuple[list[Heard], bool]:
    """Play the trace under a fault; return the answers, and whether answers were still open when it came."""
    before = await asyncio.to_thread(lambda: sites.num_borrowed)
    playing = asyncio.create_task(sites.play(trace, lends=True))
    while not playing.done() and await asyncio.to_thread(lambda: sites.num_borrowed) == before:
        await asyncio.sleep(0.05)
    await asyncio.wait({playing}, timeout=case.after_s)
    hit = not playing.done()
    await asyncio.to_thread(_strike, sites, case)
    return await playing, hit


def _strike(sites: LendingSites, case: Case) -> None:
    if case.how == "starve the link":
        sites.limit(NEARLY_NOTHING_MBIT_PER_S)
        time.sleep(case.held_s)
        sites.limit(MBIT_PER_S)
        return
    if case.how == "cut the link":
        sites.places[0].lose(1.0)
        time.sleep(case.held_s)
        sites.places[0].lose(0.0)
        return
    pids = sites.pids(case.site, "engine")
    if case.how == "kill the engine host":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return
    if case.how == "stop the site":
        pids = [sites.sites[case.site].process.pid, *pids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(case.held_s)
    for pid in pids:
        with suppress(ProcessLookupError):  # it was replaced while it stood still
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    raise SystemExit(main())
