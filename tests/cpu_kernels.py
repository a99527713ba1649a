"""The two ways to compute on a CPU: through the C library, which is built once for all tests, and through torch alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pilotlight.kernels.cpu import library
from pilotlight.kernels.cpu.c_library import Library

C_LIBRARY, TORCH = BOTH = ["C library", "torch"]

# In production the process measures which calls are faster with torch; steps with such calls cannot be recorded. Tests do not measure, because the
# result would depend on the machine's load.
library.keep_limits = lambda *_: None  # type: ignore[attr-defined]  # replaced where it is called


@contextmanager
def computing_with(wanted: str | Library) -> Iterator[None]:
    # The library is loaded before the patch: if it were loaded during the patch, the end of the patch would discard it.
    library.start(wait=True)
    if wanted == C_LIBRARY:
        if library.loaded is None:
            pytest.skip("the C library cannot be built here, or PILOTLIGHT_CPU=torch")
        yield
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "loaded", None if wanted == TORCH else wanted)
            yield


@contextmanager
def computing_without_codes() -> Iterator[None]:
    """Compute as on a CPU whose products with weights in codes are slow: weights are unpacked."""
    library.start(wait=True)
    slow: str | Library = TORCH
    if library.loaded is not None:
        slow = Library(library.loaded.path)
        slow.decodes_fast = False
    with computing_with(slow):
        yield


def skip_where_lengths_are_read_on_the_host() -> None:
    """Skip a test that records attention of several tokens per sequence if torch computes that attention.

    Torch reads the lengths on the host, so a recording would repeat those of the first step.
    """
    if library.loaded is None and not torch.cuda.is_available():
        pytest.skip("torch's attention of several tokens is never recorded")
