"""The C library that this process has loaded, if any.

This module knows when the library may be used, and for how many rows of products and prompts; it is independent of other shapes. Until `start` has
found or built it, and permanently if it cannot be built, torch computes every operation: more slowly, with the same results up to rounding.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.build import TORCH, BuildError, LibraryBuild, limits_file
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.crossover import Forms, Limits, keep_limits, measure

log = logging.getLogger(__name__)

loaded: Library | None = None  # read at every call: it may be loaded while a model is already serving


def open_library(path: Path, keep: Callable[..., None] | None = None) -> Library:
    """Load a library, and read or measure the sizes above which torch is faster.

    `keep`: called instead of `keep_limits`.
    """
    library = Library(path)
    if library.slow:
        ours = Forms(library.product, partial(ops.prefill_attention, library))
        torchs = Forms(torch.nn.functional.linear, attend_by_torch)
        limits = Limits(library.most_rows, library.most_queries)
        file = limits_file(path, torch.get_num_threads())
        (keep or keep_limits)(limits, library.slow, partial(measure, ours, torchs), file)
    return library


class LibrarySearch:
    """The search of this process for its library; it starts once."""

    def __init__(self, build: LibraryBuild, opened: Callable[[Path], Library] = open_library) -> None:
        """Prepare a search. `opened` returns the library at a path."""
        self._build = build
        self._opened = opened
        self._starting = threading.Lock()
        self._is_started = False
        self._building: threading.Thread | None = None

    def start(self, *, wait: bool = False) -> None:
        """Use the existing library, or build it in the background; with `wait`, return when it is built.

        Only the first call has an effect. Raises BuildError for a kind of CPU that cannot run here.
        """
        with self._starting:
            if self._is_started or self._build.forced_kind() == TORCH:
                return
            self._is_started = True
            if self._use_existing():
                return
            if wait:
                self._use_built()
            else:
                log.info("torch is used, which is slower, until the CPU kernels are compiled")
                self._building = threading.Thread(target=self._use_built, name="cpu-kernels", daemon=True)
                self._building.start()

    def takes_codes(self) -> bool:
        """True if products with weights in codes are faster here than with unpacked ones.

        Waits for a running build.
        """
        if self._building is not None:
            self._building.join()
        return loaded is not None and loaded.decodes_fast

    def _use_existing(self) -> bool:
        global loaded
        try:
            path = self._build.find()
        except BuildError:
            return False  # the build will fail, too, and report the reason
        if path is None:
            return False
        try:
            loaded = self._opened(path)
        except (OSError, AttributeError) as error:
            log.warning("the CPU kernels in %s are damaged (%s); building them again", path, error)
            path.unlink(missing_ok=True)
        return loaded is not None

    def _use_built(self) -> None:
        global loaded
        try:
            loaded = self._opened(self._build.build())
            log.info("the CPU kernels are ready")
        except (BuildError, OSError, AttributeError) as error:
            log.warning("the CPU kernels cannot be used; torch is used instead, which is slower: %s", error)


_search = LibrarySearch(LibraryBuild())
start, takes_codes = _search.start, _search.takes_codes


def has_products(rows: int, dtype: torch.dtype) -> bool:
    """True if the library computes products with this number of rows; torch is faster for other numbers."""
    return loaded is not None and rows <= loaded.most_rows.get(dtype, 0)
