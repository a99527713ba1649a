"""What sequences wait for without stopping others: blocks from a tier, and whatever else a thread prepares for one of them.

Each wait has one deadline and one way to be cancelled. Where it ends, the sequence goes on: with what has come, in its old place (waiting.py). Knows
who waits and until when; refuses to know what is awaited.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from pilotlight.engine.core.sequence import Sequence


class Awaited(Protocol):
    """Something that one sequence waits for."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def deadline(self) -> float:
        """The scheduler's time from which the sequence goes on without."""

    @property
    def is_admitted(self) -> bool:
        """Tell whether the sequence has its blocks already, so that it runs next; else it waits for admission next."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the sequence will compute afterwards, if all comes."""

    @property
    def is_done(self) -> bool: ...

    def cancel(self) -> None:
        """End it: afterwards nothing is written for the sequence, which has ended, lost its blocks, or waited too long."""

    def take(self) -> None:
        """Give the sequence what has come: all of it when it is done; after it was cancelled at its deadline a part, or nothing."""


class AwaitedTogether:
    """Several things that one sequence waits for before it is admitted: it goes on when all are there, or the first deadline is."""

    is_admitted = False

    def __init__(self, parts: SequenceOf[Awaited]) -> None:
        self.sequence = parts[0].sequence
        self.num_tokens = parts[0].num_tokens
        self._parts = parts

    @property
    def deadline(self) -> float:
        return min([part.deadline for part in self._parts])

    @property
    def is_done(self) -> bool:
        return all([part.is_done for part in self._parts])

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def take(self) -> None:
        for part in self._parts:
            part.take()
