"""Errors that cross the engine's layers on their way to a client. Each is one sentence that says what is wrong and what
to change."""


class CheckpointError(Exception):
    """The checkpoint is missing, truncated, misshapen or unsupported."""


class StepError(Exception):
    """A step could not produce tokens."""


class RankLostError(Exception):
    """A rank of the group is gone, or no longer where the others are: the group cannot go on."""

    def __init__(self, message: str, was_killed: bool = False) -> None:
        """`was_killed`: somebody has ended a rank, and no step."""
        super().__init__(message)
        self.was_killed = was_killed


class ImageError(Exception):
    """An image cannot be read, or not be encoded."""


class TokenizerError(Exception):
    """A tokenizer cannot be used, or a text cannot be encoded; the message says why."""
