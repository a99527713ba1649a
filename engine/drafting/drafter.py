"""The interface of a drafter: one method that guesses how a sequence continues.

A guess changes no token, since those count that would be chosen without it. So a drafter may be wrong, late or broken; its caller handles that
(speculator.py).
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from pilotlight.engine.core.sequence import Sequence


class DrafterError(Exception):
    """A violation of a drafter's rules; the message names it."""


class Draft(NamedTuple):
    """Tokens that may follow."""

    token_ids: SequenceOf[int]
    kind: str  # drafts of one kind have similar acceptance rates
    prior: float  # acceptance rate before any was verified: of a token, given that those before it were right


class Drafter(Protocol):
    name: str

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        """Guess up to `most` tokens after the sequence's known ones and `ahead`, which are guesses, too."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a sequence that has ended or moved to another engine."""


def known_tokens(sequence: Sequence) -> int:
    """Return the number of known tokens: all except one that is still being chosen."""
    return len(sequence.token_ids) - sequence.is_pending
