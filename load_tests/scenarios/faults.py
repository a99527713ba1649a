"""The effect of each fault on clients. `make bench-faults` runs the table.

python -m load_tests.scenarios.faults [--only WORDS] [--workers 1 2]

Three sites and a router, a process each, serve 18 streams at once; each stream must end with the tokens of its undisturbed run, and none may pause
for longer than its row allows. The table is repeated for each number of the router's workers. Rows that need root, a packet filter or a mount
namespace are reported as not run on a machine without these.
"""

import argparse
import sys
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from load_tests.faults import beliefs, files, limits, network, processes
from load_tests.faults.links import can_filter, in_own_namespace
from load_tests.faults.rows import Row, run_row, undisturbed
from load_tests.records import write_record

MODULE = "load_tests.scenarios.faults"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose names contain this text")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes of the router (1 2)")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    in_own_namespace(MODULE, sys.argv[1:])
    console = Console()
    results: list[dict[str, Any]] = []
    runs: dict[tuple[int, int], Any] = {}
    # Rows damage files in their folders, so each number of workers needs new rows.
    for workers, row in [(workers, row) for workers in options.workers for row in new_rows()]:
        if options.only not in row.name or (row.needs_workers and workers == 1):
            continue
        if row.needs_filter and not can_filter():
            results.append({"fault": row.name, "workers": workers, "skipped": "needs root, unshare, ip and iptables"})
            continue
        size = row.streams, row.max_tokens
        if size not in runs:
            runs[size] = undisturbed(*size)
        bodies, expected = runs[size]
        result = {"workers": workers, **run_row(row, expected, bodies, workers)}
        results.append(result)
        console.print(orjson.dumps(result).decode(), highlight=False, markup=False, soft_wrap=True)
    show(console, results)
    if not options.no_record:
        console.print(f"Record: {write_record('faults', {'rows': results})}", soft_wrap=True)
    return 1 if any(result.get("wrong") for result in results) else 0


def new_rows() -> list[Row]:
    return [row for part in (processes, network, limits, beliefs, files) for row in part.rows()]


def show(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table(
        "fault", "workers", "streams", "same", "cut", "refused", "pause s", "wrong", box=None, header_style="bold"
    )
    for result in results:
        wrong = result.get("skipped") or "; ".join(result["wrong"])[:80]
        columns = (str(result.get(name, "")) for name in ("streams", "same", "cut", "refused", "longest_pause_s"))
        table.add_row(result["fault"], str(result["workers"]), *columns, wrong)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
