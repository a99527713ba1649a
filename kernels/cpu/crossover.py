"""Find up to how many rows the library's products and attention beat torch's.

Torch is faster for many rows on CPUs with matrix units or conversions of bf16. Measured once per machine and number of threads, for about a second,
and stored beside the library, whose name identifies the CPU. This module knows products of one size, too large for any cache, and prompts of one
shape, and is independent of models. Until the measurement is done the limits are those of c_library.py.
"""

import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.varlen import VarlenBatch

log = logging.getLogger(__name__)

UNLIMITED = 1 << 62
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 512)
_OUTPUTS, _COLUMNS = 8192, 4096  # the measured weight: 64 MiB in bf16, more than caches hold
_TIMES = 3
_TRIALS = 4  # torch must win this many in a row: on a busy machine it may win some by chance, and the result is stored
_LEAST_GAIN = 1.15  # torch must win by this factor, because a step with a product by torch cannot be recorded

# Measured prompts: chunks of so many tokens at the end of a context, in the shape of a model with 8 billion weights and a quarter of its heads.
_QUERIES = (16, 64, 256, 512)
_CONTEXT, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 1024, 8, 2, 128, 16

_NICENESS = 19  # of the thread that measures: the lowest priority
_POLL_S = 0.05  # between attempts to take the lock that another process has

ProductForm = Callable[[torch.Tensor, torch.Tensor], object]  # x, weight
AttentionForm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch, AttentionRule], object]


class Forms(NamedTuple):
    """The two functions whose speed is measured, of this library or of torch."""

    product: ProductForm
    attention: AttentionForm


class Limits(NamedTuple):
    """The largest sizes that the library computes, by dtype; torch computes larger ones."""

    rows: dict[torch.dtype, int]  # most rows of a product
    queries: dict[torch.dtype, int]  # most queries of a prompt's attention without window and sinks


Measurement = Callable[[torch.dtype], tuple[int, int]]  # returns a dtype's limits, of rows and of queries


def keep_limits(into: Limits, dtypes: Iterable[torch.dtype], measure: Measurement, file: Path) -> None:
    """Fill `into` with stored measurements, or call `measure` in the background, at a low priority.

    Of several processes one measures, and the others wait for its result.
    """
    wanted = list(dtypes)
    if _fill(into, wanted, file):
        return
    # Not a daemon: the process waits for it at exit, as ending a thread inside torch's code aborts the process. It ends after the call it is in.
    threading.Thread(target=_measure_all, args=(into, wanted, measure, file), name="cpu-crossover").start()


def _fill(into: Limits, wanted: list[torch.dtype], file: Path) -> bool:
    """Fill `into` with stored measurements. Return False if there are none of these circumstances."""
    try:
        kept = json.loads(file.read_bytes())
        if kept["of"] != _circumstances():
            return False
        found = [{dtype: int(kept[name][str(dtype)]) for dtype in wanted} for name in Limits._fields]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not measured on this machine, or only by an earlier version
    into.rows.update(found[0])
    into.queries.update(found[1])
    return True


def crossover(counts: Sequence[int], torchs_gain: Callable[[int], float]) -> int:
    """Return the largest of `counts` below the first count at which torch is clearly faster.

    Returns 0 if torch is faster at the first count, and UNLIMITED if it is at none. `torchs_gain` returns our time divided by torch's, for a number
    of rows.
    """
    most = 0
    for rows in counts:
        if all(torchs_gain(rows) > _LEAST_GAIN for _ in range(_TRIALS)):
            return most
        most = rows
    return UNLIMITED


def _measure_all(into: Limits, dtypes: list[torch.dtype], measure: Measurement, file: Path) -> None:
    if sys.platform == "linux":  # where each thread has its own priority; the model is being loaded meanwhile
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    with file.with_suffix(".lock").open("w") as lock:
        while not _locked(lock):
            time.sleep(_POLL_S)
        if not _fill(into, dtypes, file):
            _measure_alone(into, dtypes, measure, file)


def _locked(lock: TextIO) -> bool:
    """Take the lock unless another process has it. Ends this thread if the process is ending."""
    _end_with_process()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_with_process() -> None:
    if not threading.main_thread().is_alive():
        sys.exit()


def _measure_alone(into: Limits, dtypes: list[torch.dtype], measure: Measurement, file: Path) -> None:
    for dtype in dtypes:
        into.rows[dtype], into.queries[dtype] = measure(dtype)
        log.debug(
            "measured: in %s the CPU library computes products of up to %s rows and attention of up to %s tokens of a prompt",
            dtype, *["any number of" if most == UNLIMITED else most for most in (into.rows[dtype], into.queries[dtype])],
        )  # fmt: skip
    measured = {
        name: {str(dtype): limits[dtype] for dtype in dtypes} for name, limits in zip(Limits._fields, into, strict=True)
    }
    with suppress(OSError):  # it is then measured again at the next start
        unfinished = file.with_suffix(".measured")
        unfinished.write_text(json.dumps({"of": _circumstances(), **measured}))
        unfinished.replace(file)


def relative_time(
    ours: Callable[[], object], torchs: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return our time divided by torch's; the least of several alternating runs, to exclude other load."""
    took = [(_duration_s(ours, clock), _duration_s(torchs, clock)) for _ in range(_TIMES)]
    ours_s, torchs_s = map(min, zip(*took, strict=True))
    return ours_s / torchs_s


def _duration_s(work: Callable[[], object], clock: Callable[[], float]) -> float:
    _end_with_process()
    began = clock()
    work()
    return clock() - began


@torch.inference_mode()
def measure(
    ours: Forms,
    torchs: Forms,
    dtype: torch.dtype,
    gain: Callable[[Callable[[], object], Callable[[], object]], float] = relative_time,
) -> tuple[int, int]:
    """Return the most rows and the most queries up to which torch is not faster."""
    weight = torch.full((_OUTPUTS, _COLUMNS), 0.01, dtype=dtype)

    def gain_in_product(rows: int) -> float:
        x = torch.ones(rows, _COLUMNS, dtype=dtype)
        return gain(lambda: ours.product(x, weight), lambda: torchs.product(x, weight))

    def gain_in_attention(queries: int) -> float:
        arguments = _prompt(queries, dtype)
        return gain(lambda: ours.attention(*arguments), lambda: torchs.attention(*arguments))

    return crossover(_ROWS, gain_in_product), crossover(_QUERIES, gain_in_attention)


def _prompt(
    queries: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch, AttentionRule]:
    blocks = _CONTEXT // _BLOCK_SIZE
    q = torch.ones(queries, _HEADS, _HEAD_DIM, dtype=dtype)
    k, v = torch.ones(2, blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, dtype=dtype)
    starts, contexts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, queries], [_CONTEXT]))
    batch = VarlenBatch(torch.arange(blocks)[None], starts, contexts, (queries,), (_CONTEXT,))
    return q, k, v, batch, AttentionRule(scale=_HEAD_DIM**-0.5)


def _circumstances() -> list[Any]:
    return [torch.__version__, torch.get_num_threads(), *_ROWS, *_QUERIES]
