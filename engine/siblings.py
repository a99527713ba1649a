"""Sequences of one prompt: all but the first wait until it has computed the prompt, and then find it cached.

Knows who waits for whom; refuses to know blocks and steps. A sibling computes for itself only the prompt's last,
partial block (and the last token, whose logits it needs): at most `block_size` tokens, less than a copy would
complicate.
"""

from engine.sequence import Sequence


class Siblings:
    def __init__(self) -> None:
        self._held: dict[Sequence, list[Sequence]] = {}  # leader -> those behind it, in order of arrival
        self._leader_of: dict[Sequence, Sequence] = {}
        self.num_tokens = 0  # of all that are held

    def __len__(self) -> int:
        return len(self._leader_of)

    def hold(self, sequence: Sequence, leader: Sequence) -> None:
        self._held.setdefault(leader, []).append(sequence)
        self._leader_of[sequence] = leader
        self.num_tokens += len(sequence.token_ids)

    def release(self, leader: Sequence) -> list[Sequence]:
        """Those that waited for `leader`; it has nobody behind it afterwards."""
        released = self._held.pop(leader, [])
        for sequence in released:
            del self._leader_of[sequence]
            self.num_tokens -= len(sequence.token_ids)
        return released

    def drop(self, sequence: Sequence) -> bool:
        """Forget one that is held. False if it is not."""
        leader = self._leader_of.pop(sequence, None)
        if leader is None:
            return False
        self._held[leader].remove(sequence)
        if not self._held[leader]:
            del self._held[leader]
        self.num_tokens -= len(sequence.token_ids)
        return True
