"""Measure whether this machine multiplies by 12-bit weights at least as fast as by plain ones.

The result is stored beside the C library. It is measured with one matrix, too large for any cache, and several numbers of rows. This module is
independent of models.
"""

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def known() -> bool | None:
    """Return the stored result for this machine; None if not measured, False without the C library."""
    file = _file()
    if file is None:
        return False  # without a C library torch would unpack the weight for every product
    try:
        kept = json.loads(file.read_bytes())
        return bool(kept["is_faster"]) if kept["of"] == _circumstances() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not measured on this machine, or by another version


def measure() -> bool:
    """Measure for a second and store the result. Stops at a number of rows for which 12 bits are slower."""
    weights, gains, is_faster = _weights(), dict[int, float](), True
    for rows in _ROWS:
        gains[rows] = _gain(rows, *weights)
        is_faster = gains[rows] >= (_LEAST_GAIN if rows == 1 else 1 / _MOST_LOSS)
        if not is_faster:
            break
    shown = ", ".join(f"{rows}: {gain:.2f}" for rows, gain in gains.items())
    log.info(
        "weights in 12 bits are %s here; speed relative to plain ones by number of rows: %s",
        "faster" if is_faster else "not faster",
        shown,
    )
    file = _file()
    if file is not None:
        with suppress(OSError):  # if it cannot be stored, it is measured again when next needed
            unfinished = file.with_suffix(".measured")
            unfinished.write_text(json.dumps({"of": _circumstances(), "is_faster": is_faster, "gains": gains}))
            unfinished.replace(file)
    return is_faster


def _weights() -> tuple[Weight, Weight]:
    plain = torch.randn(_OUTPUTS, _COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return PlainWeight(plain), pack_lossless(plain)


@torch.inference_mode()
def _gain(rows: int, plain: Weight, coded: Weight) -> float:
    x = torch.ones(rows, _COLUMNS, dtype=torch.bfloat16)
    least = [float("inf"), float("inf")]
    for _ in range(_TIMES if rows < _PROMPT_ROWS else _TIMES_OF_PROMPTS):
        for i, weight in enumerate((plain, coded)):
            began = time.perf_counter()
            weight.linear(x)
            least[i] = min(least[i], time.perf_counter() - began)
    return least[0] / least[1]


def _file() -> Path | None:
    if library.loaded is None:
        return None
    return library.loaded.path.with_suffix(f".lossless-{torch.get_num_threads()}.json")


def _circumstances() -> list[Any]:
    return [torch.__version__, torch.get_num_threads(), *_ROWS]
