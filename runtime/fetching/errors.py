"""The error type and the progress callback of downloads."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # arguments: bytes present, bytes in total


class FetchError(Exception):
    """The model cannot be fetched. The message has the reason and the change to make."""
