"""The sequences that wait to be admitted: those that could be, those that await something else first, and parallel samples behind their leader.

Knows what each of them waits for; refuses to know blocks, and whose turn it is (fairness.py).
"""

from collections.abc import Iterator

from engine.awaited import Awaited, AwaitingSequences
from engine.fairness import FairQueue
from engine.sequence import Sequence


class WaitingSequences:
    def __init__(self, quantum: int) -> None:
        """`quantum`: prompt tokens that a tenant's turn is worth."""
        self.ready = FairQueue(quantum)
        self.awaiting = AwaitingSequences()
        self._samples = ParallelSamples()
        self._awaited: dict[Sequence, Awaited] = {}  # by samples, behind their leader

    def __len__(self) -> int:
        return len(self.ready) + len(self.awaiting) + len(self._samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them will compute until they decode."""
        # One for a sample: all but a few of its tokens are cached.
        return self.ready.num_tokens + self.awaiting.num_tokens + len(self._samples)

    def add(self, sequence: Sequence, leader: Sequence | None, awaited: Awaited | None) -> None:
        """Let a sequence wait until `leader`, another of the same prompt, has computed it, then for what it awaits, then for its turn."""
        if awaited is not None:
            self._awaited[sequence] = awaited
        if leader is not None:
            self._samples.hold(sequence, leader)
        else:
            self._release(sequence)

    def take_admitted(self, now: float) -> Iterator[Sequence]:
        """Remove and return those that run next, since what they waited for with their blocks in hand has come; the others become ready."""
        for awaited in self.awaiting.take_ended(now):
            if awaited.is_admitted:
                yield awaited.sequence
            else:
                self.ready.add(awaited.sequence)

    def release_samples(self, leader: Sequence) -> None:
        """Let the samples behind a leader that has computed its prompt be admitted."""
        for sample in self._samples.release(leader):
            self._release(sample)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self._samples.drop(sequence):
            if sequence in self._awaited:
                self._awaited.pop(sequence).cancel()
        elif not self.awaiting.cancel(sequence):
            self.ready.remove(sequence)

    def cancel_awaited(self) -> None:
        """Cancel all that is awaited by sequences that are to be forgotten."""
        for awaited in self._awaited.values():
            awaited.cancel()
        self.awaiting.cancel_all()

    def replace_leader(self, leader: Sequence) -> None:
        """Let the first of the samples behind a leader that has ended compute the prompt for the others."""
        if orphans := self._samples.release(leader):
            self._release(orphans[0])
            for sample in orphans[1:]:
                self._samples.hold(sample, orphans[0])

    def _release(self, sequence: Sequence) -> None:
        awaited = self._awaited.pop(sequence, None)
        if awaited is not None:
            self.awaiting.add(awaited)
        else:
            self.ready.add(sequence)


class ParallelSamples:
    """Sequences of one prompt: all but the leader wait until it has computed the prompt, and then find it cached. A sample computes for itself only
    the prompt's last, partial block (and the last token, whose logits it needs): at most `block_size` tokens, less than a copy would complicate."""

    def __init__(self) -> None:
        self._held: dict[Sequence, list[Sequence]] = {}  # leader -> those behind it, in order of arrival
        self._leader_of: dict[Sequence, Sequence] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def hold(self, sequence: Sequence, leader: Sequence) -> None:
        self._held.setdefault(leader, []).append(sequence)
        self._leader_of[sequence] = leader

    def release(self, leader: Sequence) -> list[Sequence]:
        """Return the sequences that waited for `leader`, and hold them no longer."""
        released = self._held.pop(leader, [])
        for sequence in released:
            del self._leader_of[sequence]
        return released

    def drop(self, sequence: Sequence) -> bool:
        """Forget a held sequence. False if it is not."""
        leader = self._leader_of.pop(sequence, None)
        if leader is None:
            return False
        self._held[leader].remove(sequence)
        if not self._held[leader]:
            del self._held[leader]
        return True
