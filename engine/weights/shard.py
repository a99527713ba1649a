"""Shards of a model's weights: the runs of rows and columns that each of several ranks has.

If rows (output features: attention heads, feed-forward channels, a vocabulary) are divided, the ranks' results are concatenated; if columns (input
features) are divided, the results are summed. This module knows numbers, and is independent of tensors.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.stored_tensor import AxisRange

Split = Literal["rows", "columns"]


class MatrixPart(NamedTuple):
    """One stored matrix, or the needed run of its rows and columns."""

    name: str
    rows: AxisRange
    columns: AxisRange

    def group(self, num_columns: int | None, block: int) -> int:
        """Return how many columns share a scale: `num_columns`, or all columns if that is None.

        Raises CheckpointError if the part cuts such a group, or if kernels do not support its size: they read blocks of `block` columns.
        """
        total = self.columns.total
        group = num_columns or total
        if total % group or (group % block and group != total):
            raise CheckpointError(
                f"{self.name} has {total} columns in groups of {group}; a group must divide them and be a multiple of {block}"
            )
        if group < total:
            require_units(self.columns, group, self.name, "columns under one scale")
        return group


class ExpertStack(NamedTuple):
    """The needed part of a stored tensor of all experts; with `are_pairs`, gate and up rows alternate."""

    name: str
    experts: int
    rows: AxisRange
    columns: AxisRange
    are_pairs: bool


class Stage(NamedTuple):
    """A pipeline stage: a run of a model's layers.

    The first stage also has the embedding and the output head, and the last stage the final norm.
    """

    number: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1


class ExpertShard(NamedTuple):
    """A rank's part of a layer's experts, if each of `size` ranks has some whole experts."""

    rank: int
    size: int
    spare: int = 0  # number of additional experts, which are copies of other ranks' experts


class Shard(NamedTuple):
    """A rank's part of a model: shard `rank` of the `size` shards of each matrix of its stage."""

    rank: int = 0
    size: int = 1
    stage: Stage | None = None  # None for all layers
    experts: ExpertShard | None = None  # None if each expert is divided like other matrices

    def stage_of(self, num_layers: int) -> Stage:
        return self.stage or Stage(0, 1, range(num_layers))

    def span(
        self, total: int, unit: int = 1, name: str = "", is_split: bool = True, may_repeat: bool = False
    ) -> AxisRange:
        """Return this rank's run of `total` in whole units, or all of it unless `is_split`.

        If units do not divide evenly, ranks differ by one unit. With fewer units than ranks, as with KV heads, several ranks have the same unit if
        `may_repeat`. Raises CheckpointError if units cannot be shared.
        """
        if self.size == 1 or not is_split:
            return AxisRange(total, 0, total)
        units = -(-total // unit)
        if units < self.size and (self.size % units or not may_repeat):
            raise CheckpointError(f"{name} has {units} parts of {unit}, which {self.size} ranks cannot share evenly")
        start = units * self.rank // self.size
        end = max(start + 1, units * (self.rank + 1) // self.size)
        return AxisRange(total, start * unit, min(end * unit, total))

    def heads(self, heads: Sequence[int], name: str) -> list[int]:
        """Return the numbers of query heads and of KV heads of this rank, given those of the model.

        Raises CheckpointError if heads do not divide evenly.
        """
        num_heads, num_kv_heads = heads
        if num_heads % self.size or (num_kv_heads % self.size and self.size % num_kv_heads):
            raise CheckpointError(
                f"{name} has {num_heads} heads and {num_kv_heads} key-value heads, which {self.size} ranks cannot share evenly"
            )
        return [num_heads // self.size, max(1, num_kv_heads // self.size)]


WHOLE = Shard()


def require_units(span: AxisRange, unit: int, name: str, of: str) -> None:
    """Raise CheckpointError if the run starts or ends within a unit of `unit`."""
    if span.start % unit or (span.end % unit and span.end != span.total):
        raise CheckpointError(f"{name}: this rank's part, {span.start} to {span.end} of {span.total}, cuts {unit} {of}")
