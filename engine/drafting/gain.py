"""The measured acceptance of drafts, and their gain by batch size.

The gain compares the tokens per second of steps with and without drafts. budget.py decides by prediction which drafts to verify; this module
decides by measurement whether drafts pay off at all, in case predictions are wrong: drafts are overrated, or steps are slower than in the table. The
time that drafts and the search for them may lose is a small share of the steps' time; once it is used up, the search stops.
"""

from pilotlight.engine.drafting.costs import entry_of
from pilotlight.engine.scheduling.plan import StepCount

_TRIAL = 8  # steps without drafts that are measured first
_KEPT = 0.97  # decay of the sums per step
# Step durations are clamped to this multiple of the mean: a longer step shared a busy machine, or recorded its program.
_MOST_TIMES = 3.0
_BASELINE = 64  # number of steps with drafts after which one runs without them, for comparison
_SHARE = 0.003  # share of the time of steps without drafts that drafts may lose
_MOST_STEPS = 8.0  # the most that drafts may lose at once, in durations of a step


class AcceptanceRates:
    """Acceptance rates of drafts by kind, with a prior; for one sequence, or for all sequences of a model.

    Counts decay with each draft of a kind, verified or not, so that a kind that failed is tried again after some hundred steps.
    """

    def __init__(self, weight: float, kept: float, kept_untried: float) -> None:
        """`weight`: the prior counts as so many drafts. `kept`: decay of the counts per verified draft.

        `kept_untried`: decay per draft that is not verified.
        """
        self._weight = weight
        self._kept = kept
        self._kept_untried = kept_untried
        self._counts: dict[str, tuple[float, float]] = {}  # by kind: accepted and verified drafts

    def rate(self, kind: str, expected: float) -> float:
        """Return the probability that a draft is right if the drafts before it are. `expected`: the prior."""
        accepted, checked = self._counts.get(kind, (0.0, 0.0))
        return (accepted + self._weight * expected) / (checked + self._weight)

    def add(self, kind: str, num_accepted: float, num_checked: float = 1.0) -> None:
        accepted, checked = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = accepted * self._kept + num_accepted, checked * self._kept + num_checked

    def fade(self, kind: str) -> None:
        """Record a draft that was not worth verifying."""
        if kind in self._counts:
            accepted, checked = self._counts[kind]
            self._counts[kind] = accepted * self._kept_untried, checked * self._kept_untried


class _BatchGain:
    """The measurements of one batch size."""

    __slots__ = ("_seconds", "_tokens", "_weight", "balance", "num_plain", "num_since")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._weight = 0.0  # decayed sums over steps without drafts
        self.num_plain = 0
        self.num_since = 0  # steps with drafts since the last step without drafts
        self.balance = _MOST_STEPS  # time that drafts may still lose, in durations of a step

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
        self._batches: dict[int, _BatchGain] = {}  # by the index that entry_of returns for the batch size

    def may_draft(self, num_decodes: int) -> bool:
        """True if the next step should search for drafts."""
        batch = self._batches.get(entry_of(num_decodes))
        return batch is not None and batch.num_plain >= _TRIAL and batch.balance > 0 and batch.num_since < _BASELINE

    def count(self, step: StepCount, looking_s: float) -> None:
        """Record a step of decodes only. `looking_s`: time that it spent searching for drafts."""
        batch = self._batches.setdefault(entry_of(step.num_decodes), _BatchGain())
        if step.num_drafts:
            batch.count_drafting(step.num_tokens, step.step_s)
        else:
            batch.count_plain(step.num_tokens, step.step_s, looking_s)
