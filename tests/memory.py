"""The memory that an object keeps: tests of bounds measure it, so that they need not know where it is."""

import tracemalloc
from collections.abc import Callable


def bytes_kept_by(work: Callable[[], object]) -> int:
    """Run `work`; return the size in bytes of the memory that it leaves allocated."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
