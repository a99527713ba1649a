"""The fastest kernel, or cuBLAS, for products of a few rows with each matrix of a model's shape.

`make gpu-bench` runs it first, because the other benchmarks use its table. The table is written to the user's cache, and beside the record as a file
for kernels/tuned/.

    python -m load_tests.scenarios.tune --shape 8b
    python -m load_tests.scenarios.tune --rehearse    under Triton's interpreter, one small matrix; a record only under $OUT, nothing in the cache

Imports nothing that a bare GPU machine lacks.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from load_tests import tile_tuning
from load_tests.engine_speed import SHAPES
from load_tests.records import commit, write_record
from load_tests.timing import host_times_s
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.kernels import tuning

SUBJECT = "tuned"  # the record's subject, to which the shape is appended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--budget-s", type=float, default=60.0, help="matrices that are not reached keep cuBLAS")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("There is no CUDA device here; --rehearse tries the command on the CPU.", file=sys.stderr)
        return 3
    end = time.monotonic() + options.budget_s
    return rehearse(end) if options.rehearse else run(options.shape, torch.device("cuda"), end)


def run(shape: str, device: torch.device, end: float) -> int:
    rows: list[dict[str, Any]] = []
    table: tuning.Table = {}
    for measured in tile_tuning.tune(matrices(SHAPES[shape]), device, torch.bfloat16, until=end):
        rows.append(row(measured))
        print(line(rows[-1]), flush=True)
        table |= tile_tuning.chosen([measured])
        facts = {"device": tuning.device_name(device), "commit": commit(), "torch": torch.__version__}
        tuning.save(table, device, facts)
        path = write_record(f"{SUBJECT}-{shape}", {"shape": shape, "rows": rows}, ("torch", "triton"))
        tuning.write_table(Path(path).parent / f"{facts['device']}.json", table, facts)
    if not rows:
        return 1
    print(f"Record: {path}; table for kernels/tuned: {facts['device']}.json beside it")
    return 0


def rehearse(end: float) -> int:
    def clock(calls: Any) -> float:
        return min(host_times_s(torch.device("cpu"), call, 1, warm_ups=0)[0] for call in calls)

    rows = [row(one) for one in tile_tuning.tune([(48, 512)], torch.device("cpu"), torch.float32, clock, end)]
    for one in rows:
        print(line(one))
    if os.environ.get("OUT"):
        print(f"Record: {write_record(f'{SUBJECT}-tiny', {'shape': 'tiny', 'rows': rows}, ('torch', 'triton'))}")
    return 0 if rows else 1


def matrices(config: DenseConfig) -> list[tuple[int, int]]:
    """Return (rows, columns) of a model's matrices, by their share of a step's bytes, largest first."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(2 * inner, hidden), (hidden, inner), (q + 2 * kv, hidden), (hidden, q), (config.vocab_size, hidden)]


def row(measured: tile_tuning.TunedProduct) -> dict[str, Any]:
    sizes, cublas_s, tile, tile_s = measured
    return {
        **sizes._asdict(),
        "cublas_us": cublas_s * 1e6,
        "us": tile_s * 1e6,
        "gb_per_s": 2 * sizes.rows * sizes.columns / tile_s / 1e9,
        "tile": None if tile is None else tile._asdict(),
    }


def line(row: dict[str, Any]) -> str:
    tile = "cuBLAS" if row["tile"] is None else " ".join(f"{name} {value}" for name, value in row["tile"].items())
    sizes = f"{row['tokens']} x [{row['rows']}, {row['columns']}]"
    return f"{sizes:<24} {row['us']:>9.1f} us {row['gb_per_s']:>8,.0f} GB/s  cuBLAS {row['cublas_us']:>9.1f} us  {tile}"


if __name__ == "__main__":
    if "--rehearse" in sys.argv:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported, at the first product
    sys.exit(main())
