"""The kind of the installed torch, with or without GPUs, found without importing it.

The import takes seconds, which a host that serves by a bootstrap program does not spend.
"""

from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path


@cache
def has_gpus() -> bool:
    """True if torch was built for a kind of GPU, according to the version file in its package."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        values: dict[str, object] = {}
        try:
            exec(Path(folder, "version.py").read_text(encoding="utf-8"), values)
        except OSError:
            continue
        return any(values.get(kind) for kind in ("cuda", "hip", "rocm", "xpu"))
    return False
