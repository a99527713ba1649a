"""The interface of a drafter: one method that guesses how a sequence continues.

A guess does not change the output: it is accepted only if the model would choose the same token. So a drafter may be wrong, late or broken; its
caller handles that (speculator.py).
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from pilotlight.engine.core.sequence import Sequence


class DrafterError(Exception):
    """A drafter broke a rule, which the message names."""


class Draft(NamedTuple):
    """Guessed next tokens."""

    token_ids: SequenceOf[int]
    kind: str  # drafts of one kind have similar acceptance rates
    prior: float  # acceptance rate of a token if the tokens before it are right; used until some drafts were verified


class Drafter(Protocol):
    name: str

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        """Guess up to `most` tokens that follow the sequence's known tokens and the guesses `ahead`."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a sequence that has ended or moved to another engine."""


def known_tokens(sequence: Sequence) -> int:
    """Return the number of known tokens: all except one that is still being chosen."""
    return len(sequence.token_ids) - sequence.is_pending
