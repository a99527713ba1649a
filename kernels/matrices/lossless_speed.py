"""Measure whether this machine multiplies by 12-bit weights at least as fast as by plain ones.

The result is stored beside the C library. It is measured with one matrix, too large for any cache, and several numbers of rows. This module is
independent of models.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.lossless import pack_lossless
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import Weight

log = logging.getLogger(__name__)

# Measured numbers of rows of x: batches, and prompts, for which torch may compute the product after the weight is unpacked.
_ROWS = (1, 4, 16, 64, 128, 512, 1024)
_OUTPUTS, _COLUMNS = 8192, 4096  # the measured weight: 64 MiB in bf16
_TIMES, _TIMES_OF_PROMPTS = 7, 3  # runs of each form, alternating; the shortest counts
_PROMPT_ROWS = 128  # from so many rows on, _TIMES_OF_PROMPTS applies
_LEAST_GAIN = 1.05  # required gain for one row
_MOST_LOSS = 1.02  # allowed loss for more rows


class LosslessSpeed:
    """The comparison of 12-bit weights with plain ones, measured by `gain` unless `file` has its result.

    `gain` returns the time with plain weights divided by that with 12-bit ones, for a number of rows.
    """

    def __init__(self, file: Path | None, gain: Callable[[int], float]) -> None:
        self._file = file
        self._gain = gain

    def known(self) -> bool | None:
        """Return the stored result for this machine; None if not measured, False without the C library."""
        if self._file is None:
            return False  # without a C library torch would unpack the weight for every product
        try:
            kept = json.loads(self._file.read_bytes())
            return bool(kept["is_faster"]) if kept["of"] == _circumstances() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not measured on this machine, or by another version

    def measure(self) -> bool:
        """Measure for a second and store the result. Stops at a number of rows for which 12 bits are slower."""
        gains, is_faster = dict[int, float](), True
        for rows in _ROWS:
            gains[rows] = self._gain(rows)
            is_faster = gains[rows] >= (_LEAST_GAIN if rows == 1 else 1 / _MOST_LOSS)
            if not is_faster:
                break
        shown = ", ".join(f"{rows}: {gain:.2f}" for rows, gain in gains.items())
        log.info(
            "weights in 12 bits are %s here; speed relative to plain ones by number of rows: %s",
            "faster" if is_faster else "not faster",
            shown,
        )
        if self._file is not None:
            with suppress(OSError):  # if it cannot be stored, it is measured again when next needed
                unfinished = self._file.with_suffix(".measured")
                unfinished.write_text(json.dumps({"of": _circumstances(), "is_faster": is_faster, "gains": gains}))
                unfinished.replace(self._file)
        return is_faster


def speed_here() -> LosslessSpeed:
    """Return the comparison on this machine, stored beside the C library."""
    file = None
    if library.loaded is not None:
        file = library.loaded.path.with_suffix(f".lossless-{torch.get_num_threads()}.json")
    return LosslessSpeed(file, _Matrix().gain)


class _Matrix:
    """The measured matrix in both forms, made at its first use."""

    @cached_property
    def _forms(self) -> tuple[Weight, Weight]:
        # torch.Generator needs parts of torch that an engine host leaves out.
        values = np.random.default_rng(0).standard_normal((_OUTPUTS, _COLUMNS), dtype=np.float32)
        plain = torch.from_numpy(values).to(torch.bfloat16)
        return PlainWeight(plain), pack_lossless(plain)

    @torch.inference_mode()
    def gain(self, rows: int) -> float:
        x = torch.ones(rows, _COLUMNS, dtype=torch.bfloat16)
        least = [float("inf"), float("inf")]
        for _ in range(_TIMES if rows < _PROMPT_ROWS else _TIMES_OF_PROMPTS):
            for i, weight in enumerate(self._forms):
                began = time.perf_counter()
                weight.linear(x)
                least[i] = min(least[i], time.perf_counter() - began)
        return least[0] / least[1]


def _circumstances() -> list[Any]:
    return [torch.__version__, torch.get_num_threads(), *_ROWS]
