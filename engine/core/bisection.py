"""The search for the sequence under which steps fail: what a failed step computed is tried again by halves, each in steps of its own.

A half whose tokens are computed after all is cleared, one that fails again is halved, and a sequence that fails alone is to blame. A sequence that a
host has died under is tried alone from its first step. Every other step is the others', who go on meanwhile. Knows sequences and lengths; refuses to
know why a step fails.
"""

from collections import deque
from collections.abc import Iterator

from pilotlight.engine.core.sequence import Sequence

# A group and the number of tokens that each of its sequences has to have computed before it is cleared.
Group = dict[Sequence, int]


class Turn:
    """The sequences that one step may compute."""

    def __init__(self, suspects: "Suspects", group: Group | None = None) -> None:
        """`group`: None for the sequences that nothing is suspected of."""
        self.group = group
        self._suspects = suspects

    def may_run(self, sequence: Sequence) -> bool:
        return sequence not in self._suspects if self.group is None else sequence in self.group

    def may_admit(self, sequence: Sequence) -> bool:
        """Tell whether a sequence may have blocks: a suspect is admitted in its turn of all, and computed in its own."""
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
        """Yield whose turn the next step is, then who has it where those have nothing to compute; what is taken last is the step's."""
        groups = [Turn(self, group) for group in self._groups]
        others = Turn(self)
        for turn in [*groups, others] if self._turn.group is None else [others, *groups]:
            self._turn = turn
            yield turn

    def suspect(self, sequence: Sequence) -> None:
        """Try a sequence alone until it has computed the tokens that it has."""
        self._groups.append({sequence: len(sequence.token_ids)})

    def note_failure(self, ends: Group) -> Sequence | None:
        """Suspect the sequences of a failed step, each of which was to have computed so many tokens. Return the one that is to blame, once that is
        known."""
        was_alone = self._turn.group is not None and len(ends) == 1
        for sequence in ends:
            self.discard(sequence)
        members = list(ends)
        if was_alone:
            return members[0]
        # The halves go behind the other groups: of a device that fails whatever it computes no sequence is blamed for long.
        middle = (len(members) + 1) // 2
        self._groups += [{one: ends[one] for one in half} for half in (members[:middle], members[middle:]) if half]
        return None

    def note_success(self) -> None:
        """Clear the sequences that have computed what they were suspected of, and let the next group have its turn."""
        if not self._groups:
            return
        for group in self._groups:
            for sequence in [one for one, end in group.items() if one.num_completed_tokens >= end]:
                del group[sequence]
        if self._turn.group is not None and self._groups and self._groups[0] is self._turn.group:
            self._groups.rotate(-1)
        self._prune()

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or goes on elsewhere."""
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
