"""Waits of single sequences, for blocks from a tier or for work in a thread, while others continue.

Each wait has one deadline and one way to be cancelled. When it ends, the sequence continues with everything that has arrived, in its old place in the
queue (waiting.py). This module is independent of the reasons for waits.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from pilotlight.engine.core.sequence import Sequence


class Awaited(Protocol):
    """Something for which one sequence waits."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def deadline(self) -> float:
        """Return the time, by the scheduler's clock, at which the sequence stops waiting."""

    @property
    def is_admitted(self) -> bool:
        """True if the sequence already has its blocks and so runs next; otherwise it waits for admission."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the sequence still has to compute if everything arrives."""

    @property
    def is_done(self) -> bool: ...

    def cancel(self) -> None:
        """Cancel the wait; afterwards nothing is written to the sequence's blocks.

        Called if the sequence has ended, lost its blocks, or waited too long.
        """

    def take(self) -> None:
        """Give the sequence what has arrived: everything if done, part or nothing after a cancel.

        Called once, at the end of the wait.
        """


class AwaitedTogether:
    """Several things for which one sequence waits before it is admitted.

    The sequence continues when all have arrived, or at the first deadline.
    """

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
