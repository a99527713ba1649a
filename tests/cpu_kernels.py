"""The two ways in which a CPU computes: through the C library, which is built once for all tests, and through torch alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.cpu import library

C_LIBRARY, TORCH = BOTH = ["C library", "torch"]


@contextmanager
def computing_with(name: str) -> Iterator[None]:
    if name == TORCH:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "loaded", None)
            yield
    else:
        library.start(wait=True)
        if library.loaded is None:
            pytest.skip("the C library cannot be built here, or PILOTLIGHT_CPU=torch")
        yield
