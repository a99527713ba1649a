"""How often drafts were right: counts by kind, of one sequence or of a model's all, which lean on what was expected while there are few.

Counts fade, by each that is added and while a kind is not tried: what was bad once is tried again after some hundred steps.
"""


class AcceptanceRates:
    def __init__(self, weight: float, kept: float, kept_untried: float) -> None:
        """`weight`: of what was expected, in drafts. `kept`: of the counts at each further draft; `kept_untried`: at each that is not checked."""
        self._weight = weight
        self._kept = kept
        self._kept_untried = kept_untried
        self._counts: dict[str, tuple[float, float]] = {}  # accepted and checked

    def rate(self, kind: str, expected: float) -> float:
        """Return the share of drafts that are right, if those before were."""
        accepted, checked = self._counts.get(kind, (0.0, 0.0))
        return (accepted + self._weight * expected) / (checked + self._weight)

    def add(self, kind: str, num_accepted: float, num_checked: float = 1.0) -> None:
        accepted, checked = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = accepted * self._kept + num_accepted, checked * self._kept + num_checked

    def fade(self, kind: str) -> None:
        """Note a draft that was not worth checking."""
        if kind in self._counts:
            accepted, checked = self._counts[kind]
            self._counts[kind] = accepted * self._kept_untried, checked * self._kept_untried
