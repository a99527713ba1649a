"""References to objects, by which a test sees what is kept of them."""

import sys
from collections.abc import Sequence


def num_kept(objects: Sequence[object]) -> int:
    """Return how many of the objects are referenced from elsewhere than the sequence."""
    return sum(sys.getrefcount(objects[i]) > 2 for i in range(len(objects)))  # the sequence and the argument are two
