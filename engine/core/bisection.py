"""The search for the sequence that makes steps fail, by halves of the failed step.

A half whose tokens are then computed is cleared, one that fails again is halved, and a sequence that fails alone is to blame. A sequence under which
a host has died is tried alone from its first step. Every other step belongs to the other sequences, which continue meanwhile. Knows sequences and
lengths; does not know why a step fails.
"""

from collections import deque
from collections.abc import Iterator

from pilotlight.engine.core.sequence import Sequence

# A group of suspects, and how many tokens each must have computed before it is cleared.
Group = dict[Sequence, int]


class Turn:
    """The sequences that one step may compute."""

    def __init__(self, suspects: "Suspects", group: Group | None = None) -> None:
        """`group`: the suspects, or None for the sequences that are not suspected."""
        self.group = group
        self._suspects = suspects

    def may_run(self, sequence: Sequence) -> bool:
        return sequence not in self._suspects if self.group is None else sequence in self.group

    def may_admit(self, sequence: Sequence) -> bool:
        """True if a sequence may get blocks: a suspect only in the turn of its group."""
        return self.group is None or sequence in self.group


class Suspects:
    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._turn = Turn(self)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, sequence: Sequence) -> bool:
        return any(sequence in group for group in self._groups)

    def turns(self) -> Iterator[Turn]:
        """Yield whose turn the next step is, then whose it is if those have nothing to compute.

        The turn that is taken last becomes the step's.
        """
        groups = [Turn(self, group) for group in self._groups]
        others = Turn(self)
        for turn in [*groups, others] if self._turn.group is None else [others, *groups]:
            self._turn = turn
            yield turn

    def suspect(self, sequence: Sequence) -> None:
        """Try a sequence alone until it has recomputed its present tokens."""
        self._groups.append({sequence: len(sequence.token_ids)})

    def note_failure(self, ends: Group) -> Sequence | None:
        """Suspect the sequences of a failed step; return the one to blame once it is known.

        `ends`: how many tokens each would have computed.
        """
        was_alone = self._turn.group is not None and len(ends) == 1
        for sequence in ends:
            self.discard(sequence)
        members = list(ends)
        if was_alone:
            return members[0]
        # The halves are tried after the other groups: if a device fails at everything, no sequence is blamed for long.
        middle = (len(members) + 1) // 2
        self._groups += [{one: ends[one] for one in half} for half in (members[:middle], members[middle:]) if half]
        return None

    def note_success(self) -> None:
        """Clear the sequences that have computed the suspect tokens, and give the next group its turn."""
        if not self._groups:
            return
        for group in self._groups:
            for sequence in [one for one, end in group.items() if one.num_completed_tokens >= end]:
                del group[sequence]
        if self._turn.group is not None and self._groups and self._groups[0] is self._turn.group:
            self._groups.rotate(-1)
        self._prune()

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or moved to another engine."""
        for group in self._groups:
            group.pop(sequence, None)
        self._prune()

    def clear(self) -> None:
        self._groups.clear()
        self._prune()

    def _prune(self) -> None:
        if not all(self._groups):
            self._groups = deque(group for group in self._groups if group)
        if not self._groups:
            self._turn = Turn(self)
