"""Up to how many rows the library's own products are the faster ones, where torch's have what they lack (matrix units, or conversions of bf16).

Measured once on a machine, for a fifth of a second, and kept beside the library, whose name tells one CPU from another. Knows products of one size,
too large for any cache; refuses to know models. Until it is measured the numbers are those of library.py.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

UNLIMITED = 1 << 62
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
_OUTPUTS, _COLUMNS = 8192, 4096  # of 64 MiB in bf16, as weights come: from memory
_TIMES = 3
_LEAST_GAIN = 1.15  # of torch's: a step with a product of its cannot be recorded

Product = Callable[[torch.Tensor, torch.Tensor], object]  # x, weight


def keep_most_rows(into: dict[torch.dtype, int], dtypes: Iterable[torch.dtype], ours: Product, file: Path) -> None:
    """Fill `into` with what was measured before, or measure in the background."""
    wanted = list(dtypes)
    if not wanted:
        return
    try:
        kept = json.loads(file.read_bytes())
        if kept["of"] == _circumstances():
            into |= {dtype: int(kept["rows"][str(dtype)]) for dtype in wanted}
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never measured here, or by an earlier version
    # waited for at the end of the process: a daemon that is ended within torch's code aborts it
    threading.Thread(target=_measure, args=(into, wanted, ours, file), name="cpu-crossover").start()


def crossover(ours_s: Callable[[int], float], torchs_s: Callable[[int], float]) -> int:
    """Return the most rows up to which torch's gains too little, by functions that say what so many rows take."""
    most = 0
    for rows in _ROWS:
        if ours_s(rows) > _LEAST_GAIN * torchs_s(rows):
            return most
        most = rows
    return UNLIMITED


@torch.inference_mode()
def _measure(into: dict[torch.dtype, int], dtypes: list[torch.dtype], ours: Product, file: Path) -> None:
    for dtype in dtypes:
        weight = torch.empty(_OUTPUTS, _COLUMNS, dtype=dtype).fill_(0.01)

        def least(product: Product, rows: int, weight: torch.Tensor = weight) -> float:
            x = torch.ones(rows, _COLUMNS, dtype=weight.dtype)
            return min(_seconds(product, x, weight) for _ in range(_TIMES))

        into[dtype] = crossover(
            lambda rows, least=least: least(ours, rows),  # type: ignore[misc]
            lambda rows, least=least: least(torch.nn.functional.linear, rows),  # type: ignore[misc]
        )
        log.info("products in %s are the CPU library's up to %d rows, by measurement", dtype, into[dtype])
    kept = {"of": _circumstances(), "rows": {str(dtype): into[dtype] for dtype in dtypes}}
    with suppress(OSError):  # it is measured again at the next start
        unfinished = file.with_suffix(".measured")
        unfinished.write_text(json.dumps(kept))
        unfinished.replace(file)


def _seconds(product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
    began = time.perf_counter()
    product(x, weight)
    return time.perf_counter() - began


def _circumstances() -> list[Any]:
    return [torch.__version__, torch.get_num_threads(), *_ROWS]
