"""Acceptance rates of drafts by kind, for one sequence or a model, with a prior.

Counts fade, with each addition and while a kind is not tried, so that a kind that failed once is tried again after some hundred steps.
"""


class AcceptanceRates:
    def __init__(self, weight: float, kept: float, kept_untried: float) -> None:
        """`weight` is the prior's, in drafts. `kept`: factor of the counts at each further draft.

        `kept_untried`: factor at each draft that is not verified.
        """
        self._weight = weight
        self._kept = kept
        self._kept_untried = kept_untried
        self._counts: dict[str, tuple[float, float]] = {}  # accepted and verified

    def rate(self, kind: str, expected: float) -> float:
        """Return the share of drafts that are right, given that those before were."""
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
