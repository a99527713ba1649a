"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    try:
        return version("pilotlight-inference")
    except PackageNotFoundError:
        return "unknown"  # the code runs from a tree that was not installed
