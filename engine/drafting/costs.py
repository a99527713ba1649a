"""The measured duration of a step by its number of rows, with predictions between and beyond entries.

Every step updates the table. This module is independent of what the rows are: decodes, drafts and prompts are multiplied by the same weights.
"""

from bisect import bisect_left
from dataclasses import dataclass

# Number of steps before an entry is used: the first steps include compilation or recording (decode_graphs.py).
_TRIALS = 6
# Weights of a new duration that is shorter (_DOWN) or longer (_UP) than its entry. Other load only makes steps longer, so entries rise slowly.
_DOWN, _UP = 0.5, 0.05
_MOST_TIMES = 2.0  # a step's duration is clamped to this multiple of its entry
_MOVED = 0.02  # relative change of an entry from which on `line` is computed again
_FULL_ROWS = 8  # beyond the last entry, each further row is assumed to add 1 / (rows + 8) of the entry's duration


@dataclass(slots=True)
class _CostEntry:
    rows: float
    seconds: float
    num_steps: int = 1
    drawn_s: float = 0.0  # `seconds` when `line` was last computed

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
    """The costs of steps, in one table with drafts and one without.

    The costs differ: fewer step sizes with drafts are recorded, and their rows do other work.
    """

    def __init__(self) -> None:
        self._plain = _CostTable()
        self._checking = _CostTable()

    @property
    def is_known(self) -> bool:
        return bool(self._plain.line)

    def is_trial(self, rows: int, num_drafts: int) -> bool:
        """True if a step is among the first of its size, which compilation or recording makes slower."""
        return (self._checking if num_drafts else self._plain).num_steps(rows) < _TRIALS

    def count(self, rows: int, seconds: float, num_drafts: int = 0) -> None:
        (self._checking if num_drafts else self._plain).count(rows, seconds)

    def predict_s(self, rows: float, num_drafts: int = 0) -> float:
        """Predict the duration of a step by interpolation.

        Beyond the last entry, return an optimistic value, so that such steps are tried and measured.
        """
        without_s = self._plain.predict_s(rows - num_drafts)
        line = self._checking.line
        if not num_drafts:
            return without_s
        if not line:
            return self._plain.predict_s(rows)
        first, first_s = line[0]
        if rows < first:  # interpolate between the step without drafts and the first entry
            return without_s + max(0.0, first_s - without_s) * num_drafts / (num_drafts + first - rows)
        return max(without_s, self._checking.predict_s(rows))


class _CostTable:
    def __init__(self) -> None:
        self._entries: dict[int, _CostEntry] = {}  # by the index that entry_of returns for the rows
        self._line: list[tuple[float, float]] = []  # rows and seconds of valid entries, both ascending
        self._has_moved = False  # entries have changed since `_line` was computed

    def num_steps(self, rows: int) -> int:
        entry = self._entries.get(entry_of(rows))
        return 0 if entry is None else entry.num_steps

    def count(self, rows: int, seconds: float) -> None:
        at = entry_of(rows)
        entry = self._entries.get(at)
        if entry is None:
            self._entries[at] = _CostEntry(float(rows), seconds)
        else:
            entry.count(rows, seconds)
            if entry.num_steps >= _TRIALS and abs(entry.seconds - entry.drawn_s) > _MOVED * entry.drawn_s:
                self._has_moved = True

    def predict_s(self, rows: float) -> float:
        line = self.line
        at = bisect_left(line, (rows, 0.0))
        if at == len(line):
            last, seconds = line[-1]
            return seconds + (rows - last) * seconds / (last + _FULL_ROWS)
        above, above_s = line[at]
        if at == 0 or above == rows:
            return above_s
        below, below_s = line[at - 1]
        return below_s + (above_s - below_s) * (rows - below) / (above - below)

    @property
    def line(self) -> list[tuple[float, float]]:
        """Return (rows, seconds) of the entries, made monotonic: no step takes longer than one with more rows."""
        if self._has_moved:
            self._draw_line()
        return self._line

    def _draw_line(self) -> None:
        least_s = float("inf")
        line = []
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.rows):
            if entry.num_steps >= _TRIALS:
                entry.drawn_s = entry.seconds
                least_s = min(least_s, entry.seconds)
                line.append((entry.rows, least_s))
        self._line = line[::-1]
        self._has_moved = False


def entry_of(rows: int) -> int:
    """Return the index of the entry for a number of rows: one entry each up to 16, then 8 per doubling."""
    shift = max(0, rows.bit_length() - 4)
    return (rows >> shift) + 8 * shift
