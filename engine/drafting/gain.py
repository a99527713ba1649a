"""What checking drafts has brought, as measured, by how many sequences decode: what steps with drafts gave beside what steps without would have given
in that time.

Predictions (budget.py) say which drafts to check; this says whether that pays at all, here and now: with drafts that were overrated, where recordings
are missed, or where rows cost more than the table knows. What drafts lose, and what looking for them takes, is paid from a small share of the steps;
where that is spent, none are looked for.
"""

from pilotlight.engine.drafting.costs import entry_of
from pilotlight.engine.scheduling.plan import StepCount

_TRIAL = 8  # steps without drafts before others are compared with them
_KEPT = 0.97  # of the sums at each further step
_MOST_TIMES = 3.0  # a step's mean, that one counts for: the machine did something else meanwhile, or recorded the step
_BASELINE = 64  # steps with drafts, behind which one goes without, to be compared with
_SHARE = 0.003  # of the steps without drafts, whose time drafts may lose
_MOST_STEPS = 8.0  # that they may lose at once


class _BatchGain:
    """Of one size of batch."""

    __slots__ = ("_seconds", "_tokens", "_weight", "balance", "num_plain", "num_since")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._weight = 0.0  # of steps without drafts
        self.num_plain = 0
        self.num_since = 0  # steps with drafts since the last one without
        self.balance = _MOST_STEPS  # what drafts may lose, in steps

    def count_plain(self, num_tokens: int, seconds: float, looking_s: float) -> None:
        seconds -= looking_s
        if self.num_plain >= _TRIAL:
            mean_s = self._seconds / self._weight
            seconds = min(seconds, _MOST_TIMES * mean_s)
            self._add(-looking_s / mean_s)
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._weight = self._weight * _KEPT + 1.0
        self.num_plain += 1
        self.num_since = 0
        self._add(_SHARE)

    def count_drafting(self, num_tokens: int, seconds: float) -> None:
        self.num_since += 1
        if self._tokens and self.num_plain >= _TRIAL:
            steps = min(_MOST_TIMES, seconds * self._weight / self._seconds)
            self._add(num_tokens * self._weight / self._tokens - steps)

    def _add(self, steps: float) -> None:
        self.balance = min(_MOST_STEPS, self.balance + steps)


class MeasuredGain:
    def __init__(self) -> None:
        self._batches: dict[int, _BatchGain] = {}  # by entry_of

    def may_draft(self, num_decodes: int) -> bool:
        """Tell whether to look for drafts in the next step."""
        batch = self._batches.get(entry_of(num_decodes))
        return batch is not None and batch.num_plain >= _TRIAL and batch.balance > 0 and batch.num_since < _BASELINE

    def count(self, step: StepCount, looking_s: float) -> None:
        """Note a step of decodes alone. `looking_s`: what of it looking for drafts took."""
        batch = self._batches.setdefault(entry_of(step.num_decodes), _BatchGain())
        if step.num_drafts:
            batch.count_drafting(step.num_tokens, step.step_s)
        else:
            batch.count_plain(step.num_tokens, step.step_s, looking_s)
