"""The C library as loaded into this process, or the fact that there is none.

Knows when it may be used, and for products and prompts of how many rows; refuses to know shapes otherwise. Until `start` has found or built it, and
for ever where it cannot be built, every operation is torch's: slower, with the same results up to rounding.
"""

import logging
import threading
from functools import partial
from pathlib import Path

import torch

from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.build import TORCH, BuildError, build_library, find_library, forced_kind, limits_file
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.crossover import Forms, Limits, keep_limits

log = logging.getLogger(__name__)

loaded: Library | None = None  # read at every call: it may appear while a model is already serving
_starting = threading.Lock()
_started = False
_building: threading.Thread | None = None


def start(*, wait: bool = False) -> None:
    """Use the library that is there, or build it in the background; with `wait`, before returning. The first call counts. Raises
    BuildError for a kind of CPU that cannot be had here."""
    global _started, _building
    with _starting:
        if _started or forced_kind() == TORCH:
            return
        _started = True
        if _use_existing():
            return
        if wait:
            _use_built()
        else:
            log.info("torch computes, more slowly, until the CPU kernels are compiled")
            _building = threading.Thread(target=_use_built, name="cpu-kernels", daemon=True)
            _building.start()


def takes_codes() -> bool:
    """True if products with weights in codes are faster here than with those that are unpacked. Waits for a build that `start` has begun."""
    if _building is not None:
        _building.join()
    return loaded is not None and loaded.decodes_fast


def has_products(rows: int, dtype: torch.dtype) -> bool:
    """True if the library computes products of so many rows; torch keeps those that it is faster at."""
    return loaded is not None and rows <= loaded.most_rows.get(dtype, 0)


def _use_existing() -> bool:
    global loaded
    try:
        path = find_library()
    except BuildError:
        return False  # building will fail too, and say so
    if path is None:
        return False
    try:
        loaded = _opened(path)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels in %s are damaged (%s) and are built again", path, error)
        path.unlink(missing_ok=True)
    return loaded is not None


def _use_built() -> None:
    global loaded
    try:
        loaded = _opened(build_library())
        log.info("the CPU kernels compute from now on")
    except (BuildError, OSError, AttributeError) as error:
        log.warning("the CPU kernels cannot be used, torch computes instead, more slowly: %s", error)


def _opened(path: Path) -> Library:
    """Load the library, and find out which products and prompts are better left to torch's."""
    library = Library(path)
    if library.slow:
        ours = Forms(library.product, partial(ops.prefill_attention, library))
        torchs = Forms(torch.nn.functional.linear, attend_by_torch)
        limits = Limits(library.most_rows, library.most_queries)
        keep_limits(limits, library.slow, ours, torchs, limits_file(path))
    return library
