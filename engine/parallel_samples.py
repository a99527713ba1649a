"""Parallel samples, sequences of one prompt: all but the leader wait until it has computed the prompt, and then find it cached.

Knows which sequence waits for which; refuses to know blocks and steps. A sample computes for itself only the prompt's last, partial block (and the
last token, whose logits it needs): at most `block_size` tokens, less than a copy would complicate.
"""

from engine.sequence import Sequence


class ParallelSamples:
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
