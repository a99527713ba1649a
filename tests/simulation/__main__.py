"""Run schedules of faults against a router and three sites in virtual time: `python -m tests.simulation --schedules 1000`.

Prints each schedule that breaks a promise, with the faults that are needed for it, and exits with 1 if there is one. `--seed S --schedules 1` runs
one schedule again.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from zlib import crc32

from rich.console import Console

from tests.simulation.schedules import Schedule, draw, run

SHOWN = 20  # at most so many broken schedules are printed


def fewest_faults(schedule: Schedule) -> Schedule:
    """Return the schedule without the faults that are not needed to break a promise."""
    for fault in schedule.faults:
        fewer = replace(schedule, faults=tuple(each for each in schedule.faults if each is not fault))
        if run(fewer):
            schedule = fewer
    return schedule


def _tried(seed: int) -> tuple[int, list[str]]:
    return seed, run(draw(seed))


def _prepare() -> None:
    """Give this process a temporary state directory, where its sites write, and log errors only."""
    logging.getLogger().setLevel(logging.ERROR)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="pilotlight-simulation-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument(
        "--seed",
        default="0",
        help="number of the first schedule, or any word, which is hashed to a number; the others follow it",
    )
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    console, began = Console(), time.perf_counter()
    faults: Counter[str] = Counter()
    broken: list[tuple[int, list[str]]] = []
    first = int(options.seed) if options.seed.isdigit() else crc32(options.seed.encode())
    seeds = range(first, first + options.schedules)
    with multiprocessing.Pool(options.processes, _prepare) as pool, console.status("") as status:
        for number, (seed, sentences) in enumerate(pool.imap_unordered(_tried, seeds), 1):
            faults.update(fault.name for fault in draw(seed).faults)
            if sentences:
                broken.append((seed, sentences))
            status.update(f"{number} of {options.schedules} schedules, {len(broken)} broken")
    _prepare()
    for seed, sentences in broken[:SHOWN]:
        console.print(f"seed {seed}: {fewest_faults(draw(seed)).faults}", soft_wrap=True, markup=False)
        for sentence in sentences:
            console.print(f"  {sentence}", soft_wrap=True, markup=False)
    for name, count in sorted(faults.items()):
        console.print(f"{count:8} {name}")
    console.print(
        f"{options.schedules} schedules in {time.perf_counter() - began:.0f} s, {len(broken)} with broken promises"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
