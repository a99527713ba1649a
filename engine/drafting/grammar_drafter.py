"""Drafts of text that a sequence's grammar forces: names of properties, brackets, rests of choices.

It also drafts tokens that are forced except for white space before them. They are drafts, not forced output: if a text can be spelt with several
tokens the model still chooses among them, as it would without drafts.
"""

from collections.abc import Sequence as SequenceOf

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter import Draft

_PRIOR = 0.9
_LIKELY, _PRIOR_LIKELY = "grammar but for white space", 0.8  # of a token in whose place white space is possible


class GrammarDrafter:
    name = "grammar"

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        if sequence.matcher is None:
            return None
        found, is_forced = sequence.matcher.foreseen(ahead, most)
        if not found:
            return None
        return Draft(found, self.name, _PRIOR) if is_forced else Draft(found, _LIKELY, _PRIOR_LIKELY)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: a sequence's state is in its grammar."""
