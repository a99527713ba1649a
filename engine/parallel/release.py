"""The identity of this release, which all ranks of a group must share.

Ranks exchange Python objects, and must compute alike. Imports no torch, because releases are compared before anything is started.
"""

from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@cache
def own_release() -> dict[str, str]:
    """Return the versions that make up this release."""
    return {"pilotlight": f"{_version('pilotlight-inference')} ({_digest()})", "torch": _version("torch")}


def difference(others: dict[str, str]) -> str | None:
    """Return how the first rank's release `others` differs from this rank's, or None if they are equal."""
    own = own_release()
    odd = [name for name in own if own[name] != others.get(name)]
    if not odd:
        return None
    mine, theirs = (", ".join(f"{name} {of.get(name)}" for name in odd) for of in (own, others))
    return f"it runs {mine}, but the first rank runs {theirs}: install the same release on both"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"


def _digest() -> str:
    """Return an 8-digit hash of the engine's source. The version alone does not identify a working copy."""
    digest = blake2b(digest_size=4)
    for package in ("engine", "kernels"):
        for file in sorted((_ROOT / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
