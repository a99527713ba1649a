"""A tensor of a checkpoint: where its bytes are, and how a model expects it, whole or in part."""

from collections.abc import Iterable, Sequence
from pathlib import Path
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


class ExpectedTensor(NamedTuple):
    """A stored tensor, or a part of one, as a model expects it."""

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor
    dtypes: Sequence[str]  # allowed types
    part: tuple[AxisRange, ...] | None = None  # the needed range of each dimension; None for the whole tensor

    @classmethod
    def of(cls, name: str, dims: Iterable[AxisRange | int], dtypes: Sequence[str]) -> "ExpectedTensor":
        spans = tuple([AxisRange(dim, 0, dim) if isinstance(dim, int) else dim for dim in dims])
        is_whole = all([span.is_whole for span in spans])
        return cls(name, tuple([span.total for span in spans]), dtypes, None if is_whole else spans)


class StoredTensor(NamedTuple):
    """The bytes of a file that are one tensor, or a run of its rows."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    inner: tuple[slice, ...] = ()  # ranges of the dimensions after the rows, if only a part of them is needed
    is_coded: bool = False  # whether the bytes are a chunk of coded_chunks.py

    def part(self, spans: tuple[AxisRange, ...]) -> "StoredTensor":
        row = (self.end - self.start) // self.shape[0]
        start, end = (self.start + row * n for n in spans[0][1:])
        inner = () if all(span.is_whole for span in spans[1:]) else tuple(slice(*span[1:]) for span in spans[1:])
        return self._replace(shape=(spans[0].size, *self.shape[1:]), start=start, end=end, inner=inner)
