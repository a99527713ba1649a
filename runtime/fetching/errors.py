"""What keeps a model from being fetched, and how far it has come."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes there, bytes in total)


class FetchError(Exception):
    """The model cannot be had from there; the message says why, and what to change."""
