"""Every operation of the catalogue on this device: checked, then timed.

Times are compared with torch's own and with measured ceilings:

    python -m load_tests.scenarios.kernels            on a GPU, the calls that models make
    python -m load_tests.scenarios.kernels --rehearse on a CPU, small calls by wall clock: shows that the command works; a record only under $OUT

Imports nothing that a bare GPU machine lacks. A call with a wrong result is not timed; the table contains it, and the status is 1.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from load_tests.catalogue import OPERATIONS
from load_tests.catalogue.operation import Case, Operation
from load_tests.ceilings import Ceilings
from load_tests.kernel_speed import WrongError, measure
from load_tests.records import write_record
from load_tests.tables.kernels import others, rate, target, us
from load_tests.timing import Budget

SUBJECT = "kernels"
_MOST_COPIES = {"cuda": 64, "cpu": 2}  # two on a CPU, because a rehearsal has little time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="*", help="operations by name")
    parser.add_argument("--budget-s", type=float, default=240.0, help="limit in seconds; repeats are cut, not checks")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("There is no CUDA device here; --rehearse tries the command on the CPU.", file=sys.stderr)
        return 3
    if options.rehearse:
        return run(torch.device("cpu"), options.budget_s, math.inf, options.only)
    return run(torch.device("cuda"), options.budget_s, 1.7 * options.budget_s, options.only)


@torch.inference_mode()
def run(
    device: torch.device,
    budget_s: float,
    limit_s: float,
    only: list[str] | None = None,
    known: Sequence[Operation] = OPERATIONS,
    ceilings_of: Callable[[torch.device, tuple[torch.dtype, ...]], Ceilings] = Ceilings,
) -> int:
    """Check and time the known operations, or only some of them; return the exit status.

    After `limit_s` the rest is recorded as not reached; a record with gaps is better than none.
    """
    rehearses = device.type != "cuda"
    operations = [operation for operation in known if not only or operation.name in only]
    jobs = [
        (operation, replace(case, target=None) if rehearses else case)  # targets are for a GPU
        for operation in operations
        for case in (operation.cases if rehearses else operation.bench)
    ]
    budget = Budget(budget_s, len(jobs))
    dtypes = (torch.float32,) if rehearses else (torch.bfloat16, torch.float32, torch.float16)
    ceilings = ceilings_of(device, dtypes).measure()
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"device": device.type, "ceilings": ceilings.summary(), "rows": rows}
    end = time.monotonic() + limit_s
    for operation, case in jobs:
        if time.monotonic() > end:
            rows.append({"operation": operation.name, "case": case.name, "failure": "not reached in time"})
            continue
        rows.append(row(operation, case, device, ceilings.summary(), budget.next_share_s()))
        print(line(rows[-1]), flush=True)
        record(results)  # written after each row: a kernel that hangs later does not lose it
    results["ceilings"] = ceilings.measure().summary()  # once more at the end: the device's limits may have changed
    show(results)
    if path := record(results):
        print(f"Record: {path}")
    return 1 if any("failure" in row for row in rows) else 0


def record(results: dict[str, Any]) -> Path | None:
    """Write the record; for a rehearsal only if $OUT is set."""
    wanted = results["device"] == "cuda" or os.environ.get("OUT")
    return write_record(SUBJECT, results, ("torch", "triton")) if wanted else None


def row(
    operation: Operation, case: Case, device: torch.device, limits: dict[str, float], share_s: float
) -> dict[str, Any]:
    began = time.monotonic()
    try:
        return measure(operation, case, device, limits, share_s, _MOST_COPIES[device.type])
    except torch.OutOfMemoryError:
        failure = "the device's memory is too small to check it; set `rows` of the operation so that it can be checked in parts"
    except WrongError as error:
        failure = f"WRONG: {error}"
    except Exception as error:  # any error: the other calls are measured all the same, and the status reflects it
        failure = f"{type(error).__name__}: {error}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"operation": operation.name, "case": case.name, "failure": failure, "after_s": time.monotonic() - began}


HEADER = f"{'operation':<22} {'case':<34} {'us':>9} {'rate':>13} {'of floor':>8}  {'target':<22} others, us"


def show(results: dict[str, Any]) -> None:
    print("\n" + "  ".join(f"{name} {value:,.3f}" for name, value in results["ceilings"].items()))
    print(HEADER)
    for row in results["rows"]:
        print(line(row))
    print(verdict(results["rows"]))


def line(row: dict[str, Any]) -> str:
    name = f"{row['operation']:<22} {row['case']:<34}"
    if "failure" in row:
        return f"{name} {row['failure']}"
    cells = f"{us(row):>9} {rate(row):>13} {row['share_of_floor']:>8.0%}"
    return f"{name} {cells}  {target(row):<22} {others(row)}".rstrip()


def verdict(rows: list[dict[str, Any]]) -> str:
    failed = sum("failure" in row for row in rows)
    judged = [row["met"] for row in rows if row.get("target") is not None]
    return f"{len(rows)} calls, {failed} failed; {judged.count(True)} of {len(judged)} targets met"


if __name__ == "__main__":
    sys.exit(main())
