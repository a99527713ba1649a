"""Two faults at once, drawn by a seed: `make bench-fault-pairs` runs it.

python -m load_tests.scenarios.fault_pairs --pairs 200 --seed 1

Faults are those of load_tests/scenarios/faults.py that one network can have together. While 18 streams are open, the second fault is injected
up to 3 s after the first. A pair may have the allowed effects of both, but no stream may end normally with different tokens. Each result is a line in
a file named after the seed, so that a stopped run can be continued.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from rich.console import Console

from load_tests.faults import beliefs, files, limits, network, processes
from load_tests.faults.links import can_filter, in_own_namespace
from load_tests.faults.rows import Row, Strike, run_row, undisturbed
from load_tests.records import write_record
from load_tests.scenarios.faults import show

MODULE = "load_tests.scenarios.fault_pairs"
STREAMS, TOKENS = 18, 240
LATEST_S = 3.0  # the longest delay of the second fault after the first
REACHED_WITHIN_S = 60.0  # limit until a fault reaches its target, which the other fault may have made unreachable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only pairs whose names contain this text")
    parser.add_argument("--state", type=Path, default=Path(".fault-pairs"), help="folder of the results")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    in_own_namespace(MODULE, sys.argv[1:])
    console = Console()
    options.state.mkdir(parents=True, exist_ok=True)
    kept = options.state / f"{options.seed}.jsonl"
    results = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    known = {result["fault"] for result in results}
    bodies, expected = undisturbed(STREAMS, TOKENS)
    for row in drawn(options.pairs, options.seed):
        if row.name in known or options.only not in row.name:
            continue
        result = run_row(row, expected, bodies)
        results.append(result)
        with kept.open("a") as file:
            file.write(json.dumps(result) + "\n")
        console.print(json.dumps(result), highlight=False, markup=False, soft_wrap=True)
    show(console, results)
    wrong = [result for result in results if result["wrong"]]
    console.print(f"{len(results)} pairs, {len(wrong)} with something wrong")
    if not options.no_record:
        record = {"seed": options.seed, "pairs": len(results), "wrong": wrong}
        console.print(f"Record: {write_record('fault-pairs', record)}", soft_wrap=True)
    return int(bool(wrong))


def drawn(count: int, seed: int) -> list[Row]:
    """Draw `count` ordered pairs."""
    draw = random.Random(seed)
    pairs = [(one, other) for one, other in permutations(single_faults(), 2) if can_meet(one, other)]
    draw.shuffle(pairs)
    return [both(first, second, round(draw.uniform(0.0, LATEST_S), 2)) for first, second in pairs[:count]]


def single_faults() -> list[Row]:
    """Return the faults that can be injected into a network of three sites on this machine."""
    rows = [row for part in (processes, network, limits, beliefs, files) for row in part.rows()]
    return [row for row in rows if row.names is None and row.ends_healthy and (can_filter() or not row.needs_filter)]


def can_meet(one: Row, other: Row) -> bool:
    """Tell whether two faults can be prepared in the same network."""
    return not (one.differently.keys() & other.differently.keys()) and not (one.before and other.before)


def both(first: Row, second: Row, after_s: float) -> Row:
    """Return one row that injects both faults."""

    def strike(it: Strike) -> None:
        failures: list[str] = []

        def strike_second() -> None:
            time.sleep(after_s)
            try:
                _inject(second, it)
            except Exception as error:
                failures.append(f"{second.name}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=strike_second, daemon=True)
        thread.start()
        _inject(first, it)
        thread.join(120)
        if failures:
            raise RuntimeError(failures[0])

    return replace(
        first,
        name=f"{first.name} + {second.name}",
        fault=strike,
        differently={**first.differently, **second.differently},
        expected=_both_expected(first.expected, second.expected),
        streams=STREAMS,
        max_tokens=TOKENS,
        before=first.before or second.before,
        pause_s=first.pause_s + second.pause_s + first.pause_beside_s + second.pause_beside_s,
        may_be_cut=first.may_be_cut or second.may_be_cut,
        may_be_refused=first.may_be_refused or second.may_be_refused,
        needs_filter=first.needs_filter or second.needs_filter,
    )


def _inject(row: Row, it: Strike) -> None:
    """Inject a fault; again while its target cannot be reached, or has no process yet."""
    deadline = time.monotonic() + REACHED_WITHIN_S
    while True:
        try:
            return row.fault(it)
        except (OSError, StopIteration):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _both_expected(one: Sequence[str] | None, other: Sequence[str] | None) -> Sequence[str] | None:
    """Return the sites that are expected to start under both."""
    if one is None or other is None:
        return other if one is None else one
    return [name for name in one if name in other]


if __name__ == "__main__":
    sys.exit(main())
