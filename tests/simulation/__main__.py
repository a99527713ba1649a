"""Run schedules of faults against a router and three sites in virtual time: `python -m tests.simulation --schedules 1000`.

Prints each schedule that breaks a promise, with the faults that are needed for it, and exits with 1 if there is one. `--seed S --schedules 1` runs
one schedule again. With `--record FILE` each result is a line of the file, so that a stopped run can be continued; it repeats the schedules that
broke a promise at an earlier commit. With `--after RECORD` it continues where that record ends and adds its counts, on another machine too; schedules
that are broken in the record are repeated.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from rich.console import Console

from load_tests.records import commit, write_record
from tests.simulation.schedules import Schedule, draw, run

SHOWN = 20  # at most so many broken schedules are printed

Result = dict[str, Any]  # a line of the file: the schedule's seed, the commit, and a sentence for each broken promise


def fewest_faults(schedule: Schedule) -> Schedule:
    """Return the schedule without the faults that are not needed to break a promise."""
    for fault in schedule.faults:
        fewer = replace(schedule, faults=tuple(each for each in schedule.faults if each is not fault))
        if run(fewer):
            schedule = fewer
    return schedule


def unfinished(seeds: Iterable[int], results: Iterable[Result], commit: str) -> list[int]:
    """Return the seeds that have no result yet, and those that were broken at another commit."""
    known = {result["seed"] for result in results if not result["broken"] or result["commit"] == commit}
    return [seed for seed in seeds if seed not in known]


def _tried(seed: int) -> tuple[int, list[str]]:
    return seed, run(draw(seed))


def _prepare() -> None:
    """Give this process a temporary state directory, where its sites write, log errors only, and import and read what schedules share."""
    logging.getLogger().setLevel(logging.ERROR)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="pilotlight-simulation-")
    run(draw(0))
    gc.collect()
    gc.freeze()  # a collection after each schedule need not look at these objects again


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument(
        "--seed",
        default="0",
        help="number of the first schedule, or any word, which is hashed to a number; the others follow it",
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path, help="the file of the results; at the end a record is written")
    parser.add_argument("--after", type=Path, metavar="RECORD", help="an earlier record, which this run continues")
    options = parser.parse_args()
    earlier: dict[str, Any] = json.loads(options.after.read_text())["results"] if options.after else {}
    console, began = Console(), time.perf_counter()
    first = int(options.seed) if options.seed.isdigit() else crc32(options.seed.encode())
    first += earlier.get("schedules", 0)
    repeated = [int(seed) for seed in earlier.get("broken", {})]
    seeds = [*repeated, *range(first, first + options.schedules)]
    kept: Path = options.record or Path(os.devnull)
    results: list[Result] = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    left = unfinished(seeds, results, commit())
    with multiprocessing.Pool(options.processes, _prepare) as pool, console.status("") as status:
        for number, (seed, sentences) in enumerate(pool.imap_unordered(_tried, left), 1):
            results.append({"seed": seed, "commit": commit(), "broken": sentences})
            with kept.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            status.update(f"{number} of {len(left)} schedules")
    last = {result["seed"]: result for result in results}
    broken = {seed: result["broken"] for seed, result in last.items() if result["broken"]}
    if broken:
        _prepare()
    for seed, sentences in list(broken.items())[:SHOWN]:
        console.print(f"seed {seed}: {fewest_faults(draw(seed)).faults}", soft_wrap=True, markup=False)
        for sentence in sentences:
            console.print(f"  {sentence}", soft_wrap=True, markup=False)
    faults = Counter(fault.name for seed in last for fault in draw(seed).faults)
    for name, count in sorted(faults.items()):
        console.print(f"{count:8} {name}")
    seconds = time.perf_counter() - began
    console.print(f"{len(left)} schedules in {seconds:.0f} s; of all {len(last)}, {len(broken)} with broken promises")
    if options.record is not None:
        record = {
            "schedules": len(last.keys() - set(repeated)) + earlier.get("schedules", 0),
            "commits": Counter(last[seed]["commit"] for seed in last.keys() - set(repeated))
            + Counter(earlier.get("commits")),
            "faults": faults
            - Counter(fault.name for seed in repeated for fault in draw(seed).faults)
            + Counter(earlier.get("faults")),
            "broken": broken,
            "mended": earlier.get("mended", {})
            | {seed: earlier["broken"][str(seed)] for seed in repeated if seed not in broken}
            | {one["seed"]: one["broken"] for one in results if one["broken"] and one["seed"] not in broken},
        }
        console.print(f"Record: {write_record('schedules', record)}", soft_wrap=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
