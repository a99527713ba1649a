"""The measured limits of a device, which every speed is compared with.

Bytes read and copied per second, and matrix products per second.
"""

import statistics

import torch

from load_tests.timing import Work, host_times_s
from pilotlight.kernels.cpu import library, pages
from pilotlight.kernels.matrices.linear import linear

_GPU, _CPU = "cuda", "cpu"
BYTES = {_CPU: 1 << 30, _GPU: 4 << 30}  # much larger than any cache
# Sizes (rows, inner, columns) of the measured products: square ones, and some shaped like the product of a prompt and weights.
MATMULS = {
    _CPU: [(2048, 2048, 2048), (512, 1024, 8192), (4096, 1024, 4096)],
    _GPU: [(8192, 8192, 8192), (8192, 4096, 14336)],
}
_REPEATS = 5
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


class Ceilings:
    """Limits that are measured several times during a benchmark, because a shared machine's speed changes."""

    def __init__(self, device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
        self._device = device
        num_bytes = BYTES[device.type]
        memory = (
            pages.empty((num_bytes,), torch.uint8)
            if device.type == _CPU
            else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )
        self._memory = memory.fill_(1)
        self._read: list[float] = []
        self._copy: list[float] = []
        self._matmul: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}

    @torch.inference_mode()
    def measure(self) -> "Ceilings":
        source, target = self._memory.chunk(2)
        self._read.append(self.read_gb_per_s())
        self._copy.append(2 * source.nbytes / self._best_s(lambda: target.copy_(source)) / 1e9)
        for dtype, measured in self._matmul.items():
            measured.append(max(self._products(dtype, *shape) for shape in MATMULS[self._device.type]) / 1e12)
        return self

    @torch.inference_mode()
    def read_gb_per_s(self) -> float:
        """Measure the read bandwidth now; takes a tenth of a second."""
        return self._memory.nbytes / self._best_s(self._read_once) / 1e9

    def summary(self) -> dict[str, float]:
        """Return the median over rounds of each round's best rate. A copy counts bytes read and bytes written."""
        return {
            "read_gb_per_s": statistics.median(self._read),
            "copy_gb_per_s": statistics.median(self._copy),
            **{f"{NAMES[dtype]}_tflop_per_s": statistics.median(values) for dtype, values in self._matmul.items()},
        }

    def _best_s(self, work: Work) -> float:
        """Return the shortest time of several calls, after one warm-up call."""
        return min(host_times_s(self._device, work, _REPEATS))

    def _read_once(self) -> None:
        if self._memory.is_cpu and library.loaded is not None:
            library.loaded.sum_words(self._memory.data_ptr(), self._memory.numel() // 4, torch.get_num_threads())
        else:
            self._memory.view(torch.float32).sum()

    def _products(self, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
        a, b = (torch.randn(size, inner, device=self._device).to(dtype) for size in (rows, columns))
        torchs = self._best_s(lambda: torch.nn.functional.linear(a, b))
        # On a CPU our own product may be faster than torch's; the ceiling is the faster of the two.
        ours = self._best_s(lambda: linear(a, b)) if a.is_cpu else torchs
        return 2 * rows * inner * columns / min(torchs, ours)


def main() -> None:
    """Answer each line on stdin with the current read bandwidth, or with the summary after one more round."""
    import json
    import sys

    torch.set_num_threads(int(sys.argv[1]))
    library.start(wait=True)
    ceilings = Ceilings(torch.device("cpu"))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asks_now = json.loads(line).get("now", False)
        answer = {"read_gb_per_s": ceilings.read_gb_per_s()} if asks_now else ceilings.measure().summary()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
