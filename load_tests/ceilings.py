"""What a CPU can do at most, measured: bytes read per second and matrix products per second. Every speed is held against these."""

import statistics
import time
from collections.abc import Callable

import torch

from kernels.cpu import library, pages

READ_BYTES = 1 << 30
# rows, inner, columns: square, and as prompts meet weights
MATMULS = [(2048, 2048, 2048), (512, 1024, 8192), (4096, 1024, 4096)]
REPEATS = 5


def best_s(work: Callable[[], object]) -> float:
    """A ceiling is what was reached once; the first call warms up."""
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


class Ceilings:
    """Measured several times over a benchmark, because a shared machine changes."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = pages.empty((READ_BYTES,), torch.uint8).fill_(1)
        self._read: list[float] = []
        self._matmul: dict[torch.dtype, list[float]] = {torch.bfloat16: [], torch.float32: []}

    def measure(self) -> None:
        self._read.append(READ_BYTES / best_s(self._read_once) / 1e9)
        for dtype, measured in self._matmul.items():
            measured.append(max(self._products(dtype, *shape) for shape in MATMULS) / 1e12)

    def summary(self) -> dict[str, float]:
        """The best of each round, and of the rounds the median."""
        return {
            "read_gb_per_s": statistics.median(self._read),
            "bf16_tflop_per_s": statistics.median(self._matmul[torch.bfloat16]),
            "fp32_tflop_per_s": statistics.median(self._matmul[torch.float32]),
        }

    def _read_once(self) -> None:
        if library.loaded is not None:
            library.loaded.sum_words(self._memory.data_ptr(), READ_BYTES // 4, self.threads)
        else:
            self._memory.view(torch.float32).sum()

    def _products(self, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        return 2 * rows * inner * columns / best_s(lambda: torch.nn.functional.linear(a, b))


def main() -> None:
    """Answers each line on stdin with one more measurement and its summary."""
    import json
    import sys

    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    library.start(wait=True)
    ceilings = Ceilings(threads)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        ceilings.measure()
        print(json.dumps(ceilings.summary()), flush=True)


if __name__ == "__main__":
    main()
