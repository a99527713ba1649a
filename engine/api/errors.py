"""Errors that cross the engine's layers on their way to a client.

Each message is one sentence that names the problem and what to change.
"""


class CheckpointError(Exception):
    """The checkpoint is missing, truncated, misshapen or unsupported."""


class StepError(Exception):
    """A step could not produce tokens."""


class RankLostError(Exception):
    """A rank is lost or no longer in step with the others, so its group cannot continue."""

    def __init__(self, message: str, was_killed: bool = False) -> None:
        """Make an error. `was_killed`: the rank was killed from outside, not by a step."""
        super().__init__(message)
        self.was_killed = was_killed


class ImageError(Exception):
    """An image cannot be read or encoded."""


class TokenizerError(Exception):
    """A tokenizer cannot be used, or a text cannot be encoded; the message gives the reason."""
