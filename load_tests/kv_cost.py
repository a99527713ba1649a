"""The cost of KV bookkeeping per step: checking generations, and computing models' memory limits.

`measure` is called by larger benchmarks with their own runner; run as a program, this prints a table for a small shape, where the share of a step is
largest.

    python -m load_tests.kv_cost --shape tiny
"""

import argparse
from typing import Any

import torch

from load_tests.engine_speed import BLOCK_SIZE, SHAPES, compute, decode_step, make_runner
from load_tests.timing import median_s
from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.requirements import stale
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.lending.slab_allocator import SlabAllocator
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.block_table import BlockTable

BATCH, BLOCKS = 64, 250  # sequences of a step, blocks in each table: 4,000 tokens of context
_REPEATS = 200
_HOST = torch.device("cpu")


def measure(runner: ModelRunner, batch: int = BATCH, blocks: int = BLOCKS) -> dict[str, Any]:
    """Return the milliseconds of a decode step and of its check, and the share.

    The tables overlap, so that no memory is needed for `batch` contexts; this makes the step faster and the share larger.
    """
    assert len(runner.kv_cache) >= blocks + batch, f"the runner needs {blocks + batch} blocks"
    pool = BlockPool(len(runner.kv_cache))
    tables = [[*range(blocks - 1), blocks + i] for i in range(batch)]
    sequences = [_holding(pool, table) for table in tables]
    check_s = median_s(_HOST, lambda: stale(pool.generations, sequences), _REPEATS)
    assert stale(pool.generations, sequences) == []
    pool.generations[blocks + batch - 1] += 1
    assert stale(pool.generations, sequences) == [batch - 1], "the measured check must work"
    step = decode_step(tables, blocks * BLOCK_SIZE)
    step_s = median_s(runner.kv_cache.device, lambda: compute(runner, step))
    return {
        "batch": batch,
        "blocks": blocks,
        "check_ms": check_s * 1e3,
        "step_ms": step_s * 1e3,
        "share_of_step": check_s / step_s,
    }


def measure_slabs(num_slabs: int = 64) -> dict[str, Any]:
    """Return the milliseconds to compute how much memory one of two active models could have.

    That is done once per frame.
    """
    slab_bytes, block_bytes = 8 << 20, 1 << 18
    allocator = SlabAllocator(num_slabs, slab_bytes, lambda slab: None)
    leases = [allocator.open(name, block_bytes) for name in ("one", "two")]
    for lease in leases:
        lease.new_pool()
        for _ in range(lease.max_blocks // 2):
            lease.pool.allocate()
    return {"slabs": num_slabs, "capacity_ms": median_s(_HOST, leases[0].capacity, _REPEATS) * 1e3}


def _holding(pool: BlockPool, table: list[int]) -> Sequence:
    sequence = Sequence("", [], SamplingParams(1), b"")
    sequence.tables = [BlockTable(table, [pool.generations[block] for block in table])]
    return sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if options.shape == "tiny" and device.type == "cpu" else torch.bfloat16
    runner = make_runner(SHAPES[options.shape], device, dtype, (BLOCKS + BATCH) * BLOCK_SIZE)
    row = measure(runner)
    print(
        f"{options.shape} on {device.type}, {row['batch']} sequences of {row['blocks']} blocks: step {row['step_ms']:.2f} ms, "
        f"check of generations {row['check_ms']:.3f} ms, {row['share_of_step']:.2%} of the step"
    )
    slabs = measure_slabs()
    print(f"two models on {slabs['slabs']} slabs: {slabs['capacity_ms']:.3f} ms per frame and model for their load")


if __name__ == "__main__":
    main()
