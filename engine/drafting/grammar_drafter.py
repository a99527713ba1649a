"""Drafts what a sequence's grammar leaves no choice about: names of properties, brackets, the rest of a choice that has begun; and what it leaves no
choice about but that of white space before it.

Drafts, and not tokens that are put in their place: where one text can be spelt by several tokens the model still chooses among them, as it would have
without drafts.
"""

from collections.abc import Sequence as SequenceOf

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter import Draft

_PRIOR = 0.9
_LIKELY, _PRIOR_LIKELY = "grammar but for white space", 0.8  # of a token that white space may take the place of


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
        """Nothing is kept: a sequence has its own place in its grammar."""
