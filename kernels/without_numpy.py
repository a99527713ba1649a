"""torch without numpy, in a process that has no use for it: an engine host's.

torch imports numpy to exchange arrays with it: 25 ms, and threads of numpy's own library for matrices that look for work on every core for a
tenth of a second, while a start needs the cores. Knows how torch takes a refusal; refuses to know whose process it is.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def refuse_numpy() -> None:
    """From now on, in this whole process, unless torch or numpy are there already."""
    if "torch" in sys.modules or "numpy" in sys.modules:
        return
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    sys.meta_path.insert(0, _Refusal())


class _Refusal:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "numpy":
            raise ModuleNotFoundError("this process does without numpy (kernels/without_numpy.py)", name=name)
        return None
