"""The errors and the progress of fetching a model."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes there, bytes in total)


class FetchError(Exception):
    """The model cannot be fetched; the message has the reason and the change to make."""
