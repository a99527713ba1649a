"""A run of one dimension of a tensor."""

from typing import NamedTuple


class AxisRange(NamedTuple):
    """A run of one dimension: all of it, or a rank's part."""

    total: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.total

    def over(self, unit: int) -> "AxisRange":
        """Return the run in units of `unit`, including units that it cuts."""
        return AxisRange(*(-(-n // unit) for n in (self.total, self.start - self.start % unit, self.end)))
