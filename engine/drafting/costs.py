"""What a step takes by its rows, as measured here: a table that every step corrects, and what it says of rows between and beyond.

Refuses to know what the rows are: decodes, drafts and prompts are multiplied by the same weights.
"""

from bisect import bisect_left
from dataclasses import dataclass

_TRIALS = 6  # steps of a size before the table is believed: the first ones are compiled, or recorded (decode_graphs.py)
# What a step takes varies upwards alone, by whatever else the machine does: an entry follows shorter steps at once, and longer ones slowly.
_DOWN, _UP = 0.5, 0.05
_MOST_TIMES = 2.0  # its entry, that a step counts for
_MOVED = 0.02  # of an entry: less than that needs no new line
_FULL_ROWS = 8  # that make a step about twice as long as one row does, where nothing beyond was measured


@dataclass(slots=True)
class _CostEntry:
    rows: float
    seconds: float
    num_steps: int = 1
    drawn_s: float = 0.0  # when the line was drawn last

    def count(self, rows: int, seconds: float) -> None:
        self.num_steps += 1
        self.rows += 0.1 * (rows - self.rows)
        if self.num_steps <= _TRIALS:
            self.seconds = min(self.seconds, seconds)
        elif seconds < self.seconds:
            self.seconds += _DOWN * (seconds - self.seconds)
        else:
            self.seconds += _UP * (min(seconds, _MOST_TIMES * self.seconds) - self.seconds)


class StepCosts:
    def __init__(self) -> None:
        self._entries: dict[int, _CostEntry] = {}  # by _entry_of
        self._known: list[tuple[float, float]] = []  # rows and seconds, both rising

    @property
    def is_known(self) -> bool:
        return bool(self._known)

    def count(self, rows: int, seconds: float) -> None:
        at = _entry_of(rows)
        entry = self._entries.get(at)
        if entry is None:
            self._entries[at] = _CostEntry(float(rows), seconds)
        else:
            entry.count(rows, seconds)
            if entry.num_steps >= _TRIALS and abs(entry.seconds - entry.drawn_s) > _MOVED * entry.drawn_s:
                self._draw_line()

    def predict_s(self, rows: float) -> float:
        """Predict a step: between two entries on the line between them. Beyond the last, what rows should cost at best: then they are tried, and
        measured."""
        known = self._known
        at = bisect_left(known, (rows, 0.0))
        if at == len(known):
            last, seconds = known[-1]
            return seconds + (rows - last) * seconds / (last + _FULL_ROWS)
        above, above_s = known[at]
        if at == 0 or above == rows:
            return above_s
        below, below_s = known[at - 1]
        return below_s + (above_s - below_s) * (rows - below) / (above - below)

    def _draw_line(self) -> None:
        """Take the entries as a rising line: no step takes longer than one of more rows."""
        least_s = float("inf")
        known = []
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.rows):
            if entry.num_steps >= _TRIALS:
                entry.drawn_s = entry.seconds
                least_s = min(least_s, entry.seconds)
                known.append((entry.rows, least_s))
        self._known = known[::-1]


def _entry_of(rows: int) -> int:
    """Return the table's entry: each number up to 16 has its own, then eight share a doubling."""
    shift = max(0, rows.bit_length() - 4)
    return (rows >> shift) + 8 * shift
