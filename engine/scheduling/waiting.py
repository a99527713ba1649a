"""The sequences that wait for admission: ready ones, ones that await something, and parallel samples.

fairness.py decides whose turn it is; this module is independent of blocks.
"""

from collections.abc import Iterator

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.awaited import Awaited
from pilotlight.engine.scheduling.fairness import FairQueue


class WaitingSequences:
    def __init__(self, quantum: int) -> None:
        """`quantum`: prompt tokens per turn of a tenant."""
        self.ready = FairQueue(quantum)
        self.awaiting: dict[Sequence, Awaited] = {}
        self._samples = ParallelSamples()
        self._awaited_later: dict[Sequence, Awaited] = {}  # what samples await after the wait for their leader

    def __len__(self) -> int:
        return len(self.ready) + len(self.awaiting) + len(self._samples)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that all waiting sequences will compute until they decode."""
        # A sample counts as one token, because nearly all of its tokens will be cached.
        awaiting = sum([awaited.num_tokens for awaited in self.awaiting.values()])
        return self.ready.num_tokens + awaiting + len(self._samples)

    @property
    def admitted(self) -> list[Sequence]:
        """Return the sequences that already have their blocks while they await something."""
        return [sequence for sequence, awaited in self.awaiting.items() if awaited.is_admitted]

    @property
    def prepared(self) -> list[Sequence]:
        """Return the sequences for which something is prepared, including samples that wait for their leader."""
        return [*self.awaiting, *self._awaited_later]

    def add(self, sequence: Sequence, leader: Sequence | None, awaited: Awaited | None) -> None:
        """Queue a sequence: first for `leader`'s prompt, then for `awaited`, then for its turn.

        `leader`: another sequence with the same prompt.
        """
        if awaited is not None:
            self._awaited_later[sequence] = awaited
        if leader is not None:
            self._samples.hold(sequence, leader)
        else:
            self._release(sequence)

    def defer(self, awaited: Awaited) -> None:
        """Let a sequence that is in no queue wait for something."""
        assert awaited.sequence not in self.awaiting, "a sequence waits for one thing at a time"
        self.awaiting[awaited.sequence] = awaited

    def take_admitted(self, now: float) -> Iterator[Sequence]:
        """End the waits that are done or past their deadline; yield the sequences that run next.

        These have their blocks already. Sequences without blocks become ready for admission.
        """
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
        """Let the samples of a leader that has computed its prompt go to their own waits, or to admission."""
        for sample in self._samples.release(leader):
            self._release(sample)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        if self._samples.drop(sequence):
            if sequence in self._awaited_later:
                self._awaited_later.pop(sequence).cancel()
        elif not self.cancel_awaited(sequence):
            self.ready.remove(sequence)

    def cancel_awaited(self, sequence: Sequence) -> bool:
        """Cancel what a sequence waits for; return False if it waits for nothing."""
        awaited = self.awaiting.pop(sequence, None)
        if awaited is not None:
            awaited.cancel()
        return awaited is not None

    def cancel_all_awaited(self) -> None:
        """Cancel everything that sequences wait for, because they will all be dropped."""
        for awaited in (*self._awaited_later.values(), *self.awaiting.values()):
            awaited.cancel()

    def replace_leader(self, leader: Sequence) -> None:
        """Let the first of the samples of an ended leader compute the prompt for the others."""
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
    """Sequences with equal prompts: all but the leader wait for its prompt, then use the cache.

    A sample computes only the prompt's last, partial block (and the last token, whose logits it needs): at most `block_size` tokens, a cost too small
    to justify a copy.
    """

    def __init__(self) -> None:
        self._held: dict[Sequence, list[Sequence]] = {}  # leader -> its samples, in order of arrival
        self._leader_of: dict[Sequence, Sequence] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def hold(self, sequence: Sequence, leader: Sequence) -> None:
        self._held.setdefault(leader, []).append(sequence)
        self._leader_of[sequence] = leader

    def release(self, leader: Sequence) -> list[Sequence]:
        """Return the sequences that waited for `leader`, and stop holding them."""
        released = self._held.pop(leader, [])
        for sequence in released:
            del self._leader_of[sequence]
        return released

    def drop(self, sequence: Sequence) -> bool:
        """Remove a held sequence; return False if it is not held."""
        leader = self._leader_of.pop(sequence, None)
        if leader is None:
            return False
        self._held[leader].remove(sequence)
        if not self._held[leader]:
            del self._held[leader]
        return True
