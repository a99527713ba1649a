"""The version of this installation."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    try:
        return version("pilotlight-inference")
    except PackageNotFoundError:
        return "unknown"  # the code runs from a tree that was not installed
