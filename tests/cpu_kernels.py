"""The two ways in which a CPU computes: through the C library, which is built once for all tests, and through torch alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pilotlight.kernels.cpu import library

C_LIBRARY, TORCH = BOTH = ["C library", "torch"]

# The choice of calls for torch, and so of steps that can be recorded, is measured: in tests it would depend on the machine's load.
library.keep_limits = lambda *_: None


@contextmanager
def computing_with(name: str) -> Iterator[None]:
    library.start(wait=True)  # here: a library found while the patch below holds would be lost when it ends
    if name == TORCH:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "loaded", None)
            yield
    else:
        if library.loaded is None:
            pytest.skip("the C library cannot be built here, or PILOTLIGHT_CPU=torch")
        yield


def skip_where_lengths_are_read_on_the_host() -> None:
    """Skip a test that records attention of several tokens per sequence if torch computes it.

    A recording would keep the first step's lengths.
    """
    if library.loaded is None and not torch.cuda.is_available():
        pytest.skip("torch's attention of several tokens is never recorded")
