"""The memory of a model's tensors during layout, and how their bytes are loaded.

A model is laid out twice if memory must be allocated first: once on a `LayoutPlan`, to learn its requests, and once for real. Storage records jobs;
filling.py does them.
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
    ExpectedTensor,
    StoredTensor,
    index_checkpoint,
    packed_file,
)
from pilotlight.engine.weights.filling import DTYPES, NAMES, Job, is_stored_as, read_stored
from pilotlight.engine.weights.fused import FusedRows, divide
from pilotlight.engine.weights.staging import Make
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.mapped_file import can_join, map_parts, opened

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
META = torch.device("meta")
_LEAST_PART = 64 << 10  # below it, several maps cost more than a copy
_LARGEST_ITEM = max(ITEM_BYTES.values())


class StoredRange(NamedTuple):
    """Bytes of a file that belong to one tensor."""

    file: Path
    start: int
    num_bytes: int


class WeightStorage:
    """The memory of a model's tensors, and the way of their bytes into it.

    The base class knows the names, shapes and types of stored tensors; it neither reads nor records other requests, unless a subclass does.
    """

    def __init__(self, stored: Mapping[str, StoredTensor] | Mapping[str, TensorSpec]) -> None:
        self._stored = stored

    def __contains__(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name.

        Only for tensors that are loaded alone, by `tensor`, and those that only a quantized checkpoint has: a bundle has none of the latter, so a
        storage filled from one reports plain matrices.
        """
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        return self._stored[name].dtype

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor, on whose content the layout depends, at once; None if there is nothing to read."""
        return None

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name` of the model, to be filled later."""
        raise NotImplementedError

    def fill(self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool) -> None:
        """Record that `make(into, *stored)` fills a taken tensor, or a part of it.

        None for a copy, with its type converted.
        """

    def compute(self, task: Callable[[], None]) -> None:
        """Record a task to be done while the weights are read."""

    def skip(self, pattern: str) -> None:
        """Ignore tensors whose names match."""


class LayoutPlan(WeightStorage):
    """Storage on `meta`, without memory, that records requests.

    `tensors` are the requested ones, in order, and `in_files` has those that a file contains byte for byte.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.tensors)
        self.tensors: list[TensorSpec] = []
        self._checkpoint = checkpoint
        # Each tensor has a separate range of addresses, by which `fill` recognises its parts.
        self._addresses = torch.empty(1 << 60, dtype=torch.uint8, device=META)
        self._starts: list[int] = []
        self._end = 0
        self._fills: dict[int, list[_Fill]] = {}  # by index in `tensors`

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
        """The ranges of the tensors that can be mapped from files, by the tensor's name: usually one each."""
        found = {}
        for index, wanted in enumerate(self.tensors):
            parts = _in_files(self._fills.get(index, []), wanted)
            if parts:
                found[wanted.name] = tuple(parts)
        return found


class _Fill(NamedTuple):
    """A part of a tensor that one stored tensor fills."""

    start: int  # in the tensor's bytes
    num_bytes: int
    stored: StoredTensor | None  # its bytes are unchanged; None if they are converted


def _in_files(fills: list[_Fill], wanted: TensorSpec) -> list[StoredRange]:
    """Return the ranges that contain the tensor.

    None if a part is converted, or has another offset in its page than it would have in memory.
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
    if is_joined and min(part.num_bytes for part in parts) < _LEAST_PART:
        return []
    return parts if not is_joined or can_join([(part.start, part.num_bytes) for part in parts]) else []


class FilledStorage(WeightStorage):
    """Tensors that `allocate` makes, by name, with the `jobs` that fill them and further `tasks`.

    The base class fills none: `allocate` returns memory that is already filled.
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
    """Tensors to be filled from a checkpoint.

    Those made by `mapped` are its files' pages, and only checked.
    """

    def __init__(self, checkpoint: Checkpoint, allocate: Allocate, mapped: "MappedTensors | None" = None) -> None:
        super().__init__(checkpoint.tensors, allocate)
        self._checkpoint = checkpoint
        self._mapped = mapped

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        return read_stored(self._checkpoint.find(expected))

    def fill(self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool) -> None:
        found = tuple(self._checkpoint.find(one) for one in stored)
        # The last: among packed weights the scales, which alone can contain NaN or infinity.
        name = f"{stored[-1].name} in {found[-1].file.name}"
        is_mapped = self._mapped is not None and self._mapped.holds(into)
        self.jobs.append(Job(name, found, into, make, is_row_wise, is_mapped))

    def skip(self, pattern: str) -> None:
        self._checkpoint.skip(pattern)


class BundleStorage(FilledStorage):
    """A bundle's tensors, filled from the `file`, or without one already filled by `allocate`."""

    def __init__(self, bundle: Bundle, allocate: Allocate, file: Path | None = None) -> None:
        super().__init__({spec.name: spec for spec in bundle.specs}, allocate)
        self._file = file
        self._coded = bundle.coded
        self._placed = {placed.spec.name: placed for placed in bundle.tensors}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor `name`. Raises WeightBundleError if the bundle lacks it or has another one."""
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
    """An allocator that maps the tensors in `in_files` from their files; `allocate` makes the others."""

    def __init__(self, in_files: Mapping[str, Sequence[StoredRange]], allocate: Allocate) -> None:
        self.tasks: list[Callable[[], None]] = []  # make page tables of joined maps before their first use
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
        """True if the tensor is in a file's own pages."""
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
