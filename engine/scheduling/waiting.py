"""The sequences that wait to be admitted: those that could be, those that await something else first, and parallel samples behind their leader.

Knows what each of them waits for; refuses to know blocks, and whose turn it is (fairness.py).
"""

from collections.abc import Iterator

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.awaited import Awaited
from pilotlight.engine.scheduling.fairness import FairQueue


class WaitingSequences:
    def __init__(self, quantum: int) -> None:
        """`quantum`: prompt tokens that a tenant's turn is worth."""
        self.ready = FairQueue(quantum)
        self.awaiting: dict[Sequence, Awaited] = {}
        self._samples = ParallelSamples()
        self._awaited_later: dict[Sequence, Awaited] = {}  # by samples, behind their leader

    def __len__(self) -> int:
        return len(self.ready) + len(self.awaiting) + len(self._samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them will compute until they decode."""
        # One for a sample: all but a few of its tokens are cached.
        awaiting = sum([awaited.num_tokens for awaited in self.awaiting.values()])
        return self.ready.num_tokens + awaiting + len(self._samples)

    @property
    def admitted(self) -> list[Sequence]:
        """The sequences that await something with their blocks in hand."""
        return [sequence for sequence, awaited in self.awaiting.items() if awaited.is_admitted]

    @property
    def prepared(self) -> list[Sequence]:
        """The sequences that something is prepared for, samples that wait for their leader among them."""
        return [*self.awaiting, *self._awaited_later]

    def add(self, sequence: Sequence, leader: Sequence | None, awaited: Awaited | None) -> None:
        """Let a sequence wait until `leader`, another of the same prompt, has computed it, then for what it awaits, then for its turn."""
        if awaited is not None:
            self._awaited_later[sequence] = awaited
        if leader is not None:
            self._samples.hold(sequence, leader)
        else:
            self._release(sequence)

    def defer(self, awaited: Awaited) -> None:
        """Let a sequence that is not in any queue wait for something."""
        assert awaited.sequence not in self.awaiting, "a sequence waits for one thing at a time"
        self.awaiting[awaited.sequence] = awaited

    def take_admitted(self, now: float) -> Iterator[Sequence]:
        """End the waits for what has come, and for what has not by its deadline. Remove and return the sequences that have their blocks and run next;
        the others become ready."""
        for awaited in list(self.awaiting.values()):
            if not awaited.is_done:
                if now < awaited.deadline:
                    continue
                awaited.cancel()
            awaited.take()
            del self.awaiting[awaited.sequence]
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
            if sequence in self._awaited_later:
                self._awaited_later.pop(sequence).cancel()
        elif not self.cancel_awaited(sequence):
            self.ready.remove(sequence)

    def cancel_awaited(self, sequence: Sequence) -> bool:
        """Cancel what a sequence waits for. False if it waits for nothing."""
        awaited = self.awaiting.pop(sequence, None)
        if awaited is not None:
            awaited.cancel()
        return awaited is not None

    def cancel_all_awaited(self) -> None:
        """Cancel all that is awaited by sequences that are to be forgotten."""
        for awaited in (*self._awaited_later.values(), *self.awaiting.values()):
            awaited.cancel()

    def replace_leader(self, leader: Sequence) -> None:
        """Let the first of the samples behind a leader that has ended compute the prompt for the others."""
        if orphans := self._samples.release(leader):
            self._release(orphans[0])
            for sample in orphans[1:]:
                self._samples.hold(sample, orphans[0])

    def _release(self, sequence: Sequence) -> None:
        awaited = self._awaited_later.pop(sequence, None)
        if awaited is not None:
            self.defer(awaited)
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
