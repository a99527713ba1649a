"""Drafts what a sequence's grammar leaves no choice about: names of properties, brackets, the rest of a choice that has begun; and what it leaves no
choice about but that of white space before it.

Drafts, and not tokens that are put in their place: where one text can be spelt by several tokens the model still chooses among them, as it would have
without drafts.
"""

from collections.abc import Sequence as SequenceOf

from engine.drafting.drafter import Draft
from engine.sequence import Sequence

_PRIOR = 0.9
_PRIOR_LIKELY = 0.8  # of a token that white space may take the place of


class GrammarDrafter:
    name = "grammar"

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        if sequence.matcher is None:
            return None
        if forced := sequence.matcher.forced(ahead, most):
            return Draft(forced, self.name, _PRIOR)
        likely = sequence.matcher.likely(ahead)
        return Draft(likely, f"{self.name} but for white space", _PRIOR_LIKELY) if likely else None

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept: a sequence has its own place in its grammar."""
