"""Bisection of a failed step, which finds the sequence that makes steps fail.

Each half of the failed step's sequences is computed in separate steps. A half that succeeds is cleared, one that fails is halved again, and a
sequence that fails alone is to blame. A sequence that was being computed when its host died runs alone from its first step. Steps of suspects
alternate with steps of all other sequences. This module is independent of why a step fails.
"""

from collections import deque
from collections.abc import Iterator

from pilotlight.engine.core.sequence import Sequence

# Suspects that run together, and how many computed tokens each must reach to be cleared.
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
        """True if a waiting sequence may get blocks: in the turn of a group, only its members."""
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
        """Yield the turns to try for the next step, in order, because a turn may have nothing to compute.

        The turn that was yielded last counts as the step's turn.
        """
        groups = [Turn(self, group) for group in self._groups]
        others = Turn(self)
        for turn in [*groups, others] if self._turn.group is None else [others, *groups]:
            self._turn = turn
            yield turn

    def suspect(self, sequence: Sequence) -> None:
        """Run a sequence alone until its present tokens are computed."""
        self._groups.append({sequence: len(sequence.token_ids)})

    def note_failure(self, ends: Group) -> Sequence | None:
        """Suspect the sequences of a failed step; return the one to blame once it is known.

        `ends`: how many computed tokens each would have had after the step.
        """
        was_alone = self._turn.group is not None and len(ends) == 1
        for sequence in ends:
            self.discard(sequence)
        members = list(ends)
        if was_alone:
            return members[0]
        # The halves go to the end of the queue: if a device fails at every step, it takes long until a sequence is blamed.
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
