"""What a drafter is: one method that guesses how a sequence goes on.

A guess changes no token, since those count that are chosen without it, too. So a drafter may be wrong, late or broken; who asks it sees to that
(speculator.py).
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from pilotlight.engine.core.sequence import Sequence


class DrafterError(Exception):
    """A drafter does what none may do; the message says what."""


class Draft(NamedTuple):
    """Tokens that may follow."""

    token_ids: SequenceOf[int]
    kind: str  # drafts of one kind are accepted about as often
    prior: float  # how often, before any was checked: of a token, if those before it were right


class Drafter(Protocol):
    name: str

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        """Guess up to `most` tokens behind the sequence's known ones and `ahead`, which are guesses themselves."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended, or goes on elsewhere."""


def known_tokens(sequence: Sequence) -> int:
    """Count the tokens that are known: all but one that is still being chosen."""
    return len(sequence.token_ids) - sequence.is_pending
