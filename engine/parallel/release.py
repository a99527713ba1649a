"""What tells this release's ranks from another's: they hand each other values of their own, and must compute alike.

Imports no torch: it is asked before anything is begun.
"""

from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@cache
def own_release() -> dict[str, str]:
    """Return this release, by what it consists of."""
    return {"pilotlight": f"{_version('pilotlight-inference')} ({_digest()})", "torch": _version("torch")}


def difference(others: dict[str, str]) -> str | None:
    """Return why the other ranks are of another release than this one's; None: they are not."""
    own = own_release()
    odd = [name for name in own if own[name] != others.get(name)]
    if not odd:
        return None
    mine, theirs = (", ".join(f"{name} {of.get(name)}" for name in odd) for of in (own, others))
    return f"it runs {mine}, and the first rank {theirs}: install the same on both"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"


def _digest() -> str:
    """Return eight digits that change with the engine's source: a working copy has the version of its last release."""
    digest = blake2b(digest_size=4)
    for package in ("engine", "kernels"):
        for file in sorted((_ROOT / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
