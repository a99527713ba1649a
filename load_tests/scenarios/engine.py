"""The engine's decode and prefill steps on this device, with random weights.

`make gpu-bench` runs it after the kernels:

    python -m load_tests.scenarios.engine --shape 8b
    python -m load_tests.scenarios.engine --rehearse    on a CPU, a tiny shape, and a record only under $OUT

Imports nothing that a bare GPU machine lacks.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from load_tests.engine_speed import SHAPES, measure
from load_tests.records import write_record

SUBJECT = "engine"  # the record's subject, to which the shape is appended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=None)
    parser.add_argument("--budget-s", type=float, default=120.0, help="limit in seconds; fewer repeats fit it")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.rehearse:
        print("There is no CUDA device here; --rehearse tries the command on the CPU.", file=sys.stderr)
        return 3
    device = torch.device("cpu" if options.rehearse else "cuda")
    shape = options.shape or ("tiny" if options.rehearse else "8b")
    dtype = torch.float32 if options.rehearse and shape == "tiny" else torch.bfloat16
    batches, prompts = ([1, 4], [64, 256]) if options.rehearse else ([1, 8, 64, 256], [512, 2048, 8192, 32768])
    path = None
    for results in measure(shape, device, dtype, batches, prompts, options.budget_s):
        if not options.rehearse or os.environ.get("OUT"):  # written after each row: a later hang does not lose it
            path = write_record(f"{SUBJECT}-{shape}", results, ("torch", "triton"))
    show(results)
    if path:
        print(f"Record: {path}")
    return 0


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['shape']} {results['dtype']}, {results['weight_gb']:.2f} GB of weights read per token")
    print("  " + "  ".join(f"{name} {value:,.1f}" for name, value in results["ceilings"].items()))
    for row in results["decode"]:
        served = row["served"]
        host_ms = sum(served["host"].values()) - served["host"]["device_s"]
        extra = f"  served {served['step_ms']:8.2f} ms, host {host_ms:6.2f} ms"
        if "idle_share" in served:
            extra += f", idle {served['idle_share']:5.1%}, {row['profiled']['kernels']} kernels"
        if "served_without_graphs" in row:
            extra += f"; without graphs {row['served_without_graphs']['step_ms']:8.2f} ms"
        print(
            f"  decode  batch {row['batch']:>4}: {row['step_ms']:8.2f} ms  {row['tokens_per_s']:10,.1f} tokens/s"
            f"  {row['share_of_bandwidth']:6.1%} of bandwidth{extra}"
        )
    for row in results["prefill"]:
        print(
            f"  prefill {row['tokens']:>6} tokens: {row['step_ms']:8.2f} ms  {row['tokens_per_s']:10,.1f} tokens/s"
            f"  {row['mfu']:6.1%} of matmul rate"
        )


if __name__ == "__main__":
    sys.exit(main())
