"""What kind of torch is installed, without importing it: that takes seconds, and a host that serves by a bootstrap program waits for none of them."""

from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path


@cache
def has_gpus() -> bool:
    """True where torch was built for a kind of GPU, by the version file in its package."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        values: dict[str, object] = {}
        try:
            exec(Path(folder, "version.py").read_text(encoding="utf-8"), values)
        except OSError:
            continue
        return any(values.get(kind) for kind in ("cuda", "hip", "rocm", "xpu"))
    return False
