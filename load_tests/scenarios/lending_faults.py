"""The effect on lent prompts of a fault at either site. `make bench-lending-faults` runs it, as root.

python -m load_tests.scenarios.lending_faults

The two sites of load_tests/lending_sites.py. For each case a burst of prompts arrives at the slow site. At a random moment after the first prompt is
lent, an engine host is killed, an engine host or a whole site is stopped for some seconds, or the link is starved. Each text must be that of an
undisturbed run without lending, unless its tokens were nearly a tie there. Afterwards neither site may have open work.
"""

import argparse
import asyncio
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
from load_tests.lending_sites import BORROWER, GREEDY, LENDER, Asked, Heard, LendingSites, drawn_prompt, tie_margin
from load_tests.records import commit, write_record

MODULE = "load_tests.scenarios.lending_faults"
MBIT_PER_S, NEARLY_NOTHING_MBIT_PER_S = 1000.0, 0.05
HELD_S = (1.0, 8.0)  # least and most seconds of a stop, or of a link with nearly nothing
HOWS = ("kill the engine host", "stop the engine host", "stop the site", "starve the link")
PROMPTS = 4
TIE = 0.1  # log-probabilities; the model computes in bf16


class Case(NamedTuple):
    """A drawn fault."""

    site: str
    how: str
    after_s: float  # seconds after the first prompt was lent
    held_s: float
    trace: Sequence[Asked]


def drawn(draw: random.Random) -> Case:
    trace = [Asked(0.3 * draw.random(), BORROWER, drawn_prompt(draw, 500, 1500), GREEDY) for _ in range(PROMPTS)]
    return Case(draw.choice((BORROWER, LENDER)), draw.choice(HOWS), 6.0 * draw.random(), draw.uniform(*HELD_S), trace)


def main() -> int:
    in_own_namespace(MODULE, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that sites and cgroups are cleaned up
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="file of the model; by default the packaged SmolLM2")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=240.0, help="minutes after which no further case starts")
    parser.add_argument("--slow-share", type=float, default=0.25, help="share of a core of the slow site's engine host")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    ends_at = time.monotonic() + 60 * options.minutes
    with LendingSites(options.model, options.slow_share, MBIT_PER_S) as sites:
        for number in range(options.cases):
            if time.monotonic() > ends_at:
                break
            rows.append(_run(sites, drawn(random.Random(options.seed * 1000 + number))))
            console.print(f"{number}: {rows[-1]}", soft_wrap=True, markup=False)
    results = {
        "cases": len(rows),
        "lent": sum(row["lent"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "different": sum(len(row["margins"]) for row in rows),
        "farthest_from_tie": max((margin for row in rows for margin in row["margins"]), default=None),
        "left_open": [row["left_open"] for row in rows if row["left_open"]],
        "rows": rows,
    }
    console.print({name: value for name, value in results.items() if name != "rows"})
    if not options.no_record and not commit().endswith("+"):
        console.print(f"Record: {write_record('lending-faults', results)}", soft_wrap=True)
    return int(bool((results["farthest_from_tie"] or 0.0) > TIE or results["failed"] or results["left_open"]))


def _run(sites: LendingSites, case: Case) -> dict[str, Any]:
    sites.until_whole()
    expected = asyncio.run(sites.play(case.trace, lends=False))
    sites.until_idle()
    sites.until_whole()
    time.sleep(1.5)  # the borrower learns within a second that the lender is idle
    heard, hit = asyncio.run(_disturbed(sites, case))
    left = sites.until_idle()
    margins = [tie_margin(other, each) for each, other in zip(heard, expected, strict=True) if not each.error]
    return {
        "site": case.site, "how": case.how, "after_s": round(case.after_s, 2), "held_s": round(case.held_s, 1), "hit": hit,
        "lent": sum(each.is_lent for each in heard),
        "margins": [margin for margin in margins if margin is not None],
        "failed": sum(bool(each.error) for each in heard),
        "errors": sorted({each.error for each in heard if each.error}),
        "left_open": left,
        "slowest_s": [round(max(each.ttft_s for each in some), 1) for some in (expected, heard)],
    }  # fmt: skip


async def _disturbed(sites: LendingSites, case: Case) -> tuple[list[Heard], bool]:
    """Play the trace under a fault; return the answers, and whether answers were still open when it came."""
    before = await asyncio.to_thread(lambda: sites.status()["borrowed"])
    playing = asyncio.create_task(sites.play(case.trace, lends=True))
    while not playing.done() and await asyncio.to_thread(lambda: sites.status()["borrowed"]) == before:
        await asyncio.sleep(0.05)
    await asyncio.wait({playing}, timeout=case.after_s)
    hit = not playing.done()
    await asyncio.to_thread(_strike, sites, case)
    return await playing, hit


def _strike(sites: LendingSites, case: Case) -> None:
    if case.how == "starve the link":
        sites.places.limit(NEARLY_NOTHING_MBIT_PER_S)
        time.sleep(case.held_s)
        sites.places.limit(MBIT_PER_S)
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
