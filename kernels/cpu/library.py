"""The C library that this process has loaded, if any.

This module knows when the library may be used, and for how many rows of products and prompts; it is independent of other shapes. Until `start` has
found or built it, and permanently if it cannot be built, torch computes every operation: more slowly, with the same results up to rounding.
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

loaded: Library | None = None  # read at every call: it may be loaded while a model is already serving
_starting = threading.Lock()
_started = False
_building: threading.Thread | None = None


def start(*, wait: bool = False) -> None:
    """Use the existing library, or build it in the background; with `wait`, return when it is built.

    Only the first call has an effect. Raises BuildError for a kind of CPU that cannot run here.
    """
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
            log.info("torch is used, which is slower, until the CPU kernels are compiled")
            _building = threading.Thread(target=_use_built, name="cpu-kernels", daemon=True)
            _building.start()


def takes_codes() -> bool:
    """True if products with weights in codes are faster here than with unpacked ones.

    Waits for a running build.
    """
    if _building is not None:
        _building.join()
    return loaded is not None and loaded.decodes_fast


def has_products(rows: int, dtype: torch.dtype) -> bool:
    """True if the library computes products with this number of rows; torch is faster for other numbers."""
    return loaded is not None and rows <= loaded.most_rows.get(dtype, 0)


def _use_existing() -> bool:
    global loaded
    try:
        path = find_library()
    except BuildError:
        return False  # the build will fail, too, and report the reason
    if path is None:
        return False
    try:
        loaded = _opened(path)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels in %s are damaged (%s); building them again", path, error)
        path.unlink(missing_ok=True)
    return loaded is not None


def _use_built() -> None:
    global loaded
    try:
        loaded = _opened(build_library())
        log.info("the CPU kernels are ready")
    except (BuildError, OSError, AttributeError) as error:
        log.warning("the CPU kernels cannot be used; torch is used instead, which is slower: %s", error)


def _opened(path: Path) -> Library:
    """Load the library, and read or measure the sizes above which torch is faster."""
    library = Library(path)
    if library.slow:
        ours = Forms(library.product, partial(ops.prefill_attention, library))
        torchs = Forms(torch.nn.functional.linear, attend_by_torch)
        limits = Limits(library.most_rows, library.most_queries)
        keep_limits(limits, library.slow, ours, torchs, limits_file(path, torch.get_num_threads()))
    return library
