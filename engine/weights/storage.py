"""Storage: it provides the memory of a model's tensors during layout, and records how to fill them.

A model is laid out twice if memory must be allocated first: on a `LayoutPlan`, to record its requests, and then on the real storage. Storage records
jobs; filling.py does them.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pilotlight.engine.weights.bundles.bundle import (
    CHUNK_VALUES,
    ITEM_BYTES,
    Bundle,
    PlacedTensor,
    TensorSpec,
    WeightBundleError,
)
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.checkpoint import (
    Checkpoint,
    index_checkpoint,
    packed_file,
)
from pilotlight.engine.weights.fused import FusedRows, divide
from pilotlight.engine.weights.staging import Make
from pilotlight.engine.weights.stored_tensor import ExpectedTensor, StoredTensor
from pilotlight.engine.weights.tensor_bytes import DTYPES, NAMES, is_stored_as, read_stored
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.mapped_file import can_join, map_parts, opened

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
META = torch.device("meta")
_LARGEST_ITEM = max(ITEM_BYTES.values())


class StoredRange(NamedTuple):
    """Bytes of a file that belong to one tensor."""

    file: Path
    start: int
    num_bytes: int


class Job(NamedTuple):
    """One tensor of a model, or a part of one, to be filled from stored tensors."""

    name: str  # for error messages
    stored: tuple[StoredTensor, ...]
    into: torch.Tensor
    make: Make | None = None  # None for a copy that converts the type
    is_row_wise: bool = True  # rows of `into` come from the same rows of the stored tensors
    is_mapped: bool = False  # `into` is a map of the file, so its values are only checked

    @property
    def num_bytes(self) -> int:
        return sum(stored.end - stored.start for stored in self.stored)


class WeightStorage:
    """The memory of a model's tensors, and the requests to fill it.

    The base class only knows the names, shapes and types of stored tensors, and ignores requests.
    """

    def __init__(self, stored: Mapping[str, StoredTensor] | Mapping[str, TensorSpec]) -> None:
        self._stored = stored

    def __contains__(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor of that name.

        Only ask for a tensor that is loaded unfused, or that only a quantized checkpoint has. A bundle has no tensors of the second kind, so with a
        bundle all matrices are plain.
        """
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        return self._stored[name].dtype

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor at once, because the layout depends on its content; None if not available."""
        return None

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name` of the model, to be filled later."""
        raise NotImplementedError

    def fill(self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool) -> None:
        """Record that make(into, *stored) fills a taken tensor, or a part of it.

        `make` is None for a copy that converts the type.
        """

    def compute(self, task: Callable[[], None]) -> None:
        """Record a task to be done while the weights are read."""

    def skip(self, pattern: str) -> None:
        """Ignore redundant tensors, whose names match `pattern`."""


class LayoutPlan(WeightStorage):
    """Storage on `meta`, without memory, that records requests.

    `tensors` lists the requested tensors, in order; `in_files` has those that files contain byte for byte.
    """

    def __init__(self, checkpoint: Checkpoint, least_part_bytes: int = USUAL_LIMITS.least_part_bytes) -> None:
        """`least_part_bytes`: parts of a tensor that are mapped have at least so many bytes each."""
        super().__init__(checkpoint.tensors)
        self._least_part_bytes = least_part_bytes
        self.tensors: list[TensorSpec] = []
        self._checkpoint = checkpoint
        # Each tensor gets a separate range of addresses, by which `fill` recognises parts of it.
        self._addresses = torch.empty(1 << 60, dtype=torch.uint8, device=META)
        self._starts: list[int] = []
        self._end = 0
        self._fills: dict[int, list[_Fill]] = {}  # fills of each tensor, by its index in `tensors`

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        return read_stored(self._checkpoint.find(expected))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wanted = TensorSpec(name, NAMES[dtype], shape)
        start = self._end
        self.tensors.append(wanted)
        self._starts.append(start)
        self._end = start + -(-max(1, wanted.num_bytes) // _LARGEST_ITEM) * _LARGEST_ITEM
        return self._addresses[start : start + wanted.num_bytes].view(dtype).view(shape)

    def fill(self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool) -> None:
        found = [self._checkpoint.find(one) for one in stored]
        start = int(into.storage_offset()) * into.itemsize
        index = bisect_right(self._starts, start) - 1
        is_as_stored = make is None and into.is_contiguous() and is_stored_as(into, found[0])
        self._fills.setdefault(index, []).append(
            _Fill(start - self._starts[index], into.nbytes, found[0] if is_as_stored else None)
        )

    @property
    def in_files(self) -> dict[str, tuple[StoredRange, ...]]:
        """The file ranges of the tensors that can be mapped, by the tensor's name: usually one range each."""
        found = {}
        for index, wanted in enumerate(self.tensors):
            parts = _in_files(self._fills.get(index, []), wanted, self._least_part_bytes)
            if parts:
                found[wanted.name] = tuple(parts)
        return found


class _Fill(NamedTuple):
    """A part of a tensor that one stored tensor fills."""

    start: int  # offset in the tensor's bytes
    num_bytes: int
    stored: StoredTensor | None  # the stored tensor with exactly these bytes; None if bytes are converted


def _in_files(fills: list[_Fill], wanted: TensorSpec, least_part_bytes: int) -> list[StoredRange]:
    """Return the file ranges that, joined, are the tensor's bytes.

    Returns none if a part is converted or misaligned, or the ranges cannot be joined: a range is too short, or their offsets within a page do not
    match.
    """
    parts: list[StoredRange] = []
    done = 0
    for fill in sorted(fills, key=lambda fill: fill.start):
        if fill.stored is None or fill.start != done:
            return []
        last = parts[-1] if parts else None
        if last is not None and (fill.stored.file, fill.stored.start) == (last.file, last.start + last.num_bytes):
            parts[-1] = last._replace(num_bytes=last.num_bytes + fill.num_bytes)
        else:
            parts.append(StoredRange(fill.stored.file, fill.stored.start, fill.num_bytes))
        done += fill.num_bytes
    if not parts or done != wanted.num_bytes or parts[0].start % ITEM_BYTES[wanted.dtype]:
        return []
    is_joined = len(parts) > 1
    if is_joined and min(part.num_bytes for part in parts) < least_part_bytes:
        return []
    return parts if not is_joined or can_join([(part.start, part.num_bytes) for part in parts]) else []


class FilledStorage(WeightStorage):
    """Storage whose tensors `allocate` makes; it records the `jobs` that fill them, and further `tasks`.

    The base class records no jobs, for memory that is already filled.
    """

    def __init__(self, stored: Mapping[str, StoredTensor] | Mapping[str, TensorSpec], allocate: Allocate) -> None:
        super().__init__(stored)
        self.jobs: list[Job] = []
        self.tasks: list[Callable[[], None]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._allocate = allocate

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.tensors[name] = self._allocate(name, shape, dtype)
        return tensor

    def compute(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)


class CheckpointStorage(FilledStorage):
    """Storage whose tensors are filled from a checkpoint.

    Tensors that `mapped` makes are maps of the checkpoint's files, whose values are only checked.
    """

    def __init__(self, checkpoint: Checkpoint, allocate: Allocate, mapped: "MappedTensors | None" = None) -> None:
        super().__init__(checkpoint.tensors, allocate)
        self._checkpoint = checkpoint
        self._mapped = mapped

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        return read_stored(self._checkpoint.find(expected))

    def fill(self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool) -> None:
        found = tuple(self._checkpoint.find(one) for one in stored)
        # Errors name the last stored tensor. For packed weights that is the scales, which alone can contain NaN or infinity.
        name = f"{stored[-1].name} in {found[-1].file.name}"
        is_mapped = self._mapped is not None and self._mapped.holds(into)
        self.jobs.append(Job(name, found, into, make, is_row_wise, is_mapped))

    def skip(self, pattern: str) -> None:
        self._checkpoint.skip(pattern)


class BundleStorage(FilledStorage):
    """Storage of a bundle's tensors, filled from `file`; without `file`, `allocate` returns filled memory."""

    def __init__(self, bundle: Bundle, allocate: Allocate, file: Path | None = None) -> None:
        super().__init__({spec.name: spec for spec in bundle.specs}, allocate)
        self._file = file
        self._coded = bundle.coded
        self._placed = {placed.spec.name: placed for placed in bundle.tensors}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name`. Raises WeightBundleError if the bundle lacks it in this shape and type."""
        wanted, found = TensorSpec(name, NAMES[dtype], shape), self._stored.get(name)
        if found != wanted:
            raise WeightBundleError(f"it has {found} but the model needs {wanted}")
        into = super().take(name, shape, dtype)
        if self._file is not None and name in self._coded:
            for i, part in enumerate(torch.split(into.view(-1), CHUNK_VALUES)):
                self._fill_from(self._file, f"{name}~{i}", part, is_coded=True)
        elif self._file is not None:
            self._fill_from(self._file, name, into, is_coded=False)
        return into

    def _fill_from(self, file: Path, name: str, into: torch.Tensor, is_coded: bool) -> None:
        placed = self._placed.get(name)
        if placed is None:
            raise WeightBundleError(f"it lacks {name}")
        dtype, shape = NAMES[into.dtype], tuple(into.shape)
        stored = StoredTensor(file, dtype, shape, placed.start, placed.end, is_coded=is_coded)
        self.jobs.append(Job(f"{name} in {file.name}", (stored,), into, is_row_wise=not is_coded))


class MetaStorage(WeightStorage):
    """Storage on `meta` for a dry run, with only the names, types and shapes of a checkpoint's tensors."""

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        super().__init__({spec.name: spec for spec in tensors})

    @classmethod
    def open(cls, directory: Path, fused: tuple[FusedRows, ...] = ()) -> "MetaStorage":
        packed = packed_file(directory)
        if packed is None:
            stored = divide(index_checkpoint(directory), fused)
            return cls(TensorSpec(name, at.dtype, at.shape) for name, at in stored.items())
        with BundleFile.open(packed) as file:
            return cls(file.bundle.specs)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)


class MappedTensors:
    """An allocator that maps the tensors in `in_files` from files; `allocate` makes the other tensors."""

    def __init__(self, in_files: Mapping[str, Sequence[StoredRange]], allocate: Allocate) -> None:
        self.tasks: list[
            Callable[[], None]
        ] = []  # tasks that fill the page tables of joined maps before their first use
        self._in_files = in_files
        self._allocate = allocate
        files = sorted({part.file for parts in in_files.values() for part in parts})
        self._files = {file: _map(file) for file in files}
        self._mapped = [_addresses(memory) for memory in self._files.values()]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parts = self._in_files.get(name)
        if parts is None:
            return self._allocate(name, shape, dtype)
        memory = self._part(parts[0]) if len(parts) == 1 else self._joined(parts)
        return memory.view(dtype).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is a map of a file."""
        return any(start <= tensor.data_ptr() < end for start, end in self._mapped)

    def _part(self, part: StoredRange) -> torch.Tensor:
        return self._files[part.file][part.start : part.start + part.num_bytes]

    def _joined(self, parts: Sequence[StoredRange]) -> torch.Tensor:
        mapped = map_parts(parts)
        memory = pages.tensor_of(mapped)
        self._mapped.append(_addresses(memory))
        self.tasks.append(mapped.populate)
        return memory


def _addresses(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes


def _map(file: Path) -> torch.Tensor:
    with opened(file) as fd:
        return pages.map_file(fd, os.fstat(fd).st_size)


class BundleMemory:
    """An allocator of views of `memory`, which is laid out like `bundle`."""

    def __init__(self, memory: torch.Tensor, bundle: Bundle) -> None:
        self._memory = memory
        self._placed = {placed.spec.name: placed for placed in bundle.tensors}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        placed = self._placed[name]
        assert placed.spec == (name, NAMES[dtype], shape), f"{name} was planned as {placed.spec}"
        return self.tensor(placed)

    def tensor(self, placed: PlacedTensor) -> torch.Tensor:
        return self._memory[placed.start : placed.end].view(DTYPES[placed.spec.dtype]).view(placed.spec.shape)


def on_device(device: torch.device) -> Allocate:
    """Return an allocator that allocates every tensor on the device."""
    return lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device)
