"""The requests of layers for weights, by name and shape, which return storage that is filled later.

Storage is filled after the whole model has been laid out. Until then nothing may be computed from it, so a conversion is part of the request. Fused
projections are one matrix whose rows come from several tensors, so that a step does one matmul instead of three. If several ranks share a model, a
request describes how to divide the tensor (`split`), and each rank gets its rows or columns.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.bundles.lossless import CODES, ESCAPES, PALETTES, STARTS, Matrix, check_coded
from pilotlight.engine.weights.formats.format import FLOATS, PLAIN, WeightFormat, stacked_name
from pilotlight.engine.weights.shard import WHOLE, ExpertStack, MatrixPart, Shard, Split
from pilotlight.engine.weights.staging import Make
from pilotlight.engine.weights.storage import WeightStorage
from pilotlight.engine.weights.stored_tensor import AxisRange, ExpectedTensor
from pilotlight.engine.weights.tensor_bytes import DTYPES
from pilotlight.kernels.matrices.lossless import PALETTE, LosslessWeight, num_palettes, row_bytes
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import Weight

Arrange = Callable[[torch.Tensor], torch.Tensor]  # converts a stored tensor to the shape of the model's tensor


class WeightLoader:
    """The requests of a model, or of one of its ranks, in one storage and one type.

    `keeps_packed`: weights stored in `format` stay packed, for kernels that decode them; otherwise they are unpacked to `dtype` during the load.
    """

    def __init__(
        self,
        storage: WeightStorage,
        dtype: torch.dtype,
        device: torch.device,
        format: WeightFormat | None = None,
        keeps_packed: bool = False,
        shard: Shard = WHOLE,
        reads_codes: bool = False,
    ) -> None:
        """Make a loader. `reads_codes`: the storage is a bundle, in which matrices may be coded in 12 bits."""
        self.matrices: dict[str, Matrix] = {}  # matrices that may be coded in 12 bits, by their tensors' names
        self._reads_codes = reads_codes
        # Projections that adapters may change, in layout order. None for a derived loader, whose matrices adapters do not change.
        self.projections: list[MatrixPart] | None = []
        self._storage = storage
        self.dtype = dtype
        self.device = device
        self._format = format
        self._keeps_packed = keeps_packed
        self.shard = shard

    def __contains__(self, name: str) -> bool:
        """Return True if the tensor is stored, plainly or in codes (see Storage)."""
        return name in self._storage or name + CODES in self._storage

    def shape(self, name: str) -> tuple[int, ...]:
        return self._storage.shape(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        if name not in self._storage:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint; config.json asks for it")
        return DTYPES[self._storage.dtype(name)]

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor at once, because the layout depends on its content.

        Returns None if its content is not available; config.json then decides.
        """
        return self._storage.look(expected)

    def with_dtype(self, dtype: torch.dtype) -> "WeightLoader":
        return self._changed(dtype=dtype)

    def unshared(self) -> "WeightLoader":
        """Return a loader of the same model that loads whole tensors on this rank."""
        return self._changed(shard=WHOLE)

    def unpacked(self) -> "WeightLoader":
        """Return a loader of the same model that unpacks all matrices."""
        return self._changed(_keeps_packed=False)

    def _changed(self, **attributes: object) -> "WeightLoader":
        loader = copy(self)
        vars(loader).update(attributes, matrices={}, projections=None)
        return loader

    def has_rows(self, names: Sequence[str]) -> bool:
        """True if the checkpoint has the tensors that `rows` would request."""
        return stacked_name(names) in self._storage or all(name in self._storage for name in names)

    @property
    def is_quantized(self) -> bool:
        return self._format is not None

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Request the stored tensor of this name and shape."""
        into = self.empty(name, *shape)
        self.read(name, into)
        return into

    def rows(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *row_shape: int,
        split: Split | None = None,
        unit: int | Sequence[int] = 1,
        repeats: bool = False,
    ) -> torch.Tensor:
        """Request several stored tensors, stacked along their first dimension.

        Equal names are runs of one tensor.
        """
        spans = self._spans(names, rows, unit, split == "rows", repeats)
        into = self.empty(stacked_name(names), sum(span.size for span in spans), *row_shape)
        for name, span, part in zip(names, spans, torch.split(into, [span.size for span in spans]), strict=True):
            self.fill(part, [ExpectedTensor.of(name, (span, *row_shape), FLOATS)], None)
        return into

    def matrix(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        experts: int = 1,
        split: Split | None = None,
        unit: int | Sequence[int] = 1,
        repeats: bool = False,
    ) -> Weight:
        """Request the projections `names` stacked, [sum(rows), columns], packed if stored so and supported.

        Equal names are runs of one tensor's rows, which ranks share one by one. `experts`: number of experts to which they belong, for [experts,
        rows, columns]. `split`: ranks share the rows or the columns of each projection, in multiples of `unit`, one for all or one for each.
        Several ranks hold the same rows of a projection with fewer units than ranks, if it is fused or `repeats`.
        """
        parts = self._parts(names, rows, columns, split, unit, repeats)
        of_parts = [self._format_of(name) for name in names]
        packed = PLAIN if PLAIN in of_parts else of_parts[0]
        if packed is not PLAIN and self._keeps_packed and packed.joins(self, parts, experts):
            weight = packed.lay_out(self, parts, experts)
        else:
            sizes = [part.rows.size for part in parts]
            name, width = stacked_name([f"{name}.weight" for name in names]), parts[0].columns.size
            coded = self._coded(name, sum(sizes), Matrix(width, experts))
            if coded is not None:
                return coded if experts == 1 else coded.by_expert(experts)
            into = self.empty(name, sum(sizes), width)
            for format, part, place in zip(of_parts, parts, torch.split(into, sizes), strict=True):
                format.fill(self, part, place)
            weight = PlainWeight(into)
        return weight if experts == 1 else weight.by_expert(experts)

    def note_projections(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        split: Split | None,
        unit: int | Sequence[int],
        repeats: bool = False,
    ) -> tuple[int, tuple[int, ...]]:
        """Number the projections of a matrix, for adapters that change them.

        Returns the number of the first projection, and the index at which the rows of each end on this rank; no indices if adapters change none.
        """
        if self.projections is None or len(set(names)) < len(names):  # adapters of a tensor in runs are refused
            return 0, ()
        first, parts = len(self.projections), self._parts(names, rows, columns, split, unit, repeats)
        self.projections += parts
        return first, tuple(accumulate(part.rows.size for part in parts))

    def stack(
        self,
        name: str,
        experts: int,
        rows: int,
        columns: int,
        *,
        split: Split | None = None,
        are_pairs: bool = False,
        num_parts: int = 1,
    ) -> Weight:
        """Request the matrices of all experts, [experts, rows, columns], from one stored tensor.

        `are_pairs`: gate and up rows alternate in the stored tensor; here gate rows come first. `num_parts`: number of matrices stacked per expert,
        each of which is divided among the ranks. Raises CheckpointError if ranks have different experts.
        """
        if self.shard.experts is not None:
            raise CheckpointError(
                f"{name} contains all experts in one tensor, which ranks can only share in parts: unset expert_parallel"
            )
        of_columns = self.shard.span(columns, 1, name, split == "columns")
        part = self.shard.span(rows // num_parts, 2 if are_pairs else 1, name, split == "rows")
        spans = [AxisRange(rows, 0, rows)]
        if not part.is_whole:
            spans = [AxisRange(rows, i + part.start, i + part.end) for i in range(0, rows, part.total)]
        stacks = [ExpertStack(name, experts, span, of_columns, are_pairs) for span in spans]
        format = self._format_of(name)
        if format is not PLAIN and self._keeps_packed:
            (stack,) = stacks
            return format.lay_out_stack(self, stack)
        sizes = [span.size for span in spans]
        coded = self._coded(name, experts * sum(sizes), Matrix(of_columns.size, experts))
        if coded is not None:
            return coded.by_expert(experts)
        into = self.empty(name, experts, sum(sizes), of_columns.size)
        for stack, place in zip(stacks, torch.split(into, sizes, dim=1), strict=True):
            format.fill_stack(self, stack, place)
        return PlainWeight(into)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of any type, which the caller fills with `fill`."""
        return self._storage.take(name, shape, dtype)

    def empty(self, name: str, *shape: int) -> torch.Tensor:
        """Return a new tensor that the caller fills in parts, with `read` or `fill`."""
        return self._storage.take(name, shape, self.dtype)

    def read(
        self, name: str, into: torch.Tensor, stored_shape: tuple[int, ...] | None = None, arrange: Arrange | None = None
    ) -> None:
        """Request to fill `into` from tensor `name`, with its type converted.

        The stored tensor must have the shape of `into`, or `stored_shape` if `arrange` converts it.
        """
        stored = ExpectedTensor(name, tuple(into.shape) if stored_shape is None else stored_shape, FLOATS)
        if arrange is None:
            self.fill(into, [stored], None)
        else:
            self.fill(into, [stored], lambda part, source: part.copy_(arrange(source)), is_row_wise=False)

    def fill(
        self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool = True
    ) -> None:
        """Request a later call of make(into, *stored), from any thread; if `make` is None, copy and convert.

        `is_row_wise`: rows of `into` depend only on the same rows of the stored tensors, so `make` may be called for runs of rows.
        """
        self._storage.fill(into, stored, make, is_row_wise)

    def compute(self, task: Callable[[], None]) -> None:
        """Request a task that computes data that is in no checkpoint, while the weights are read."""
        self._storage.compute(task)

    def skip(self, pattern: str) -> None:
        """Ignore redundant tensors, whose names match `pattern`."""
        self._storage.skip(pattern)

    def skip_tensors(self, names: Sequence[str]) -> None:
        """Ignore tensors that other ranks load."""
        for name in names:
            self.skip(re.escape(name))

    def _coded(self, name: str, rows: int, matrix: Matrix) -> LosslessWeight | None:
        """Request a matrix in 12 bits; return None if the storage does not have it in 12 bits."""
        self.matrices[name] = matrix
        if not self._reads_codes or name + CODES not in self._storage:
            return None
        take, uint8, int32 = self._storage.take, torch.uint8, torch.int32
        weight = LosslessWeight(
            take(name + CODES, (rows, row_bytes(matrix.columns)), uint8),
            take(name + PALETTES, (num_palettes(rows), PALETTE), uint8),
            take(name + STARTS, (num_palettes(rows) + 1,), int32),
            take(name + ESCAPES, self._storage.shape(name + ESCAPES), int32),
            matrix.columns,
        )
        self.compute(lambda: check_coded(name, weight))
        return weight

    def _parts(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        split: Split | None,
        unit: int | Sequence[int],
        repeats: bool,
    ) -> list[MatrixPart]:
        of_columns = self.shard.span(columns, unit if isinstance(unit, int) else 1, names[0], split == "columns")
        spans = self._spans(names, rows, unit, split == "rows", repeats)
        return [MatrixPart(name, span, of_columns) for name, span in zip(names, spans, strict=True)]

    def _spans(
        self, names: Sequence[str], rows: Sequence[int], unit: int | Sequence[int], is_split: bool, repeats: bool
    ) -> list[AxisRange]:
        """Return this rank's run of each tensor's rows; equal names are runs of one tensor, in order."""
        totals: Counter[str] = Counter()
        spans, units = [], [unit] * len(names) if isinstance(unit, int) else unit
        for name, n, size in zip(names, rows, units, strict=True):
            span = self.shard.span(n, size, name, is_split, repeats or len(names) > 1)
            spans.append(AxisRange(n, totals[name] + span.start, totals[name] + span.end))
            totals[name] += n
        return [span._replace(total=totals[name]) for name, span in zip(names, spans, strict=True)]

    def _format_of(self, name: str) -> WeightFormat:
        return self._format if self._format is not None and self._format.holds(self._storage, name) else PLAIN
