"""Where a model's tensors lie while it is laid out, and how their bytes come there: the forms of `layers.weights.Storage`.

A model is laid out twice where memory is to be had first: once on nothing, to learn what it asks for, once for good. Knows tensors and jobs; refuses
to know how jobs are done (filling.py) and when.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from engine.weights.bundle import ITEM_BYTES, Bundle, BundleError, Place, Wanted
from engine.weights.bundle_file import BundleFile
from engine.weights.filling import DTYPES, NAMES, Job, Make
from engine.weights.reader import Checkpoint, Stored, StoredTensor
from kernels.cpu import pages
from kernels.cpu.mapped_file import MappedParts, Part, can_join

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
META = torch.device("meta")
_LEAST_PART = 64 << 10  # below, several maps cost more than a copy
_LARGEST_ITEM = max(ITEM_BYTES.values())


class FilePart(NamedTuple):
    """Where some of a tensor's bytes lie."""

    file: Path
    start: int
    num_bytes: int


class Plan:
    """On nothing: `wanted` are the tensors that the model asks for, in order, and `in_files` says which of them a file holds just so."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.wanted: list[Wanted] = []
        self._checkpoint = checkpoint
        # Each tensor has a range of addresses of its own, by which its parts are known again.
        self._addresses = torch.empty(1 << 60, dtype=torch.uint8, device=META)
        self._starts: list[int] = []
        self._end = 0
        self._fills: dict[int, list[_Fill]] = {}  # by place in `wanted`

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wanted = Wanted(name, NAMES[dtype], shape)
        start = self._end
        self.wanted.append(wanted)
        self._starts.append(start)
        self._end = start + -(-max(1, wanted.num_bytes) // _LARGEST_ITEM) * _LARGEST_ITEM
        return self._addresses[start : start + wanted.num_bytes].view(dtype).view(shape)

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        found = [self._checkpoint.find(*one) for one in stored]
        start = int(into.storage_offset()) * into.itemsize
        index = bisect_right(self._starts, start) - 1
        is_as_stored = make is None and into.is_contiguous() and DTYPES[found[0].dtype] == into.dtype
        self._fills.setdefault(index, []).append(
            _Fill(start - self._starts[index], into.nbytes, found[0] if is_as_stored else None)
        )

    def compute(self, work: Callable[[], None]) -> None:
        pass

    def skip(self, pattern: str) -> None:
        pass

    @property
    def in_files(self) -> dict[str, tuple[FilePart, ...]]:
        """The tensors, by name, whose bytes can be mapped from the files, and where they lie: mostly one behind the other, in one part."""
        found = {}
        for index, wanted in enumerate(self.wanted):
            parts = _in_files(self._fills.get(index, []), wanted)
            if parts:
                found[wanted.name] = tuple(parts)
        return found


class _Fill(NamedTuple):
    """What is written to a part of a tensor."""

    start: int  # in the tensor's bytes
    num_bytes: int
    stored: StoredTensor | None  # whose bytes they are; None: they are made of something


def _in_files(fills: list[_Fill], wanted: Wanted) -> list[FilePart]:
    """None where some are not as stored, or where parts do not begin at the same place of a page as they would in memory."""
    parts: list[FilePart] = []
    done = 0
    for fill in sorted(fills, key=lambda fill: fill.start):
        if fill.stored is None or fill.start != done:
            return []
        last = parts[-1] if parts else None
        if last is not None and (fill.stored.file, fill.stored.start) == (last.file, last.start + last.num_bytes):
            parts[-1] = last._replace(num_bytes=last.num_bytes + fill.num_bytes)
        else:
            parts.append(FilePart(fill.stored.file, fill.stored.start, fill.num_bytes))
        done += fill.num_bytes
    if not parts or done != wanted.num_bytes or parts[0].start % ITEM_BYTES[wanted.dtype]:
        return []
    is_joined = len(parts) > 1
    if is_joined and min(part.num_bytes for part in parts) < _LEAST_PART:
        return []
    return parts if not is_joined or can_join([(part.start, part.num_bytes) for part in parts]) else []


class FromCheckpoint:
    """Memory that is to be filled from a checkpoint, by the `jobs` and `works` noted here."""

    def __init__(self, checkpoint: Checkpoint, allocate: Allocate) -> None:
        self.jobs: list[Job] = []
        self.works: list[Callable[[], None]] = []
        self.taken: dict[str, torch.Tensor] = {}  # by name
        self._checkpoint = checkpoint
        self._allocate = allocate

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.taken[name] = self._allocate(name, shape, dtype)
        return tensor

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        found = tuple(self._checkpoint.find(*one) for one in stored)
        self.jobs.append(self._job(into, stored, found, make, is_cut))

    def _job(
        self,
        into: torch.Tensor,
        stored: Sequence[Stored],
        found: tuple[StoredTensor, ...],
        make: Make | None,
        is_cut: bool,
    ) -> Job:
        # the last: of packed weights the scales, the only ones that can be no number
        return Job(f"{stored[-1][0]} in {found[-1].file.name}", found, into, make, is_cut)

    def compute(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def skip(self, pattern: str) -> None:
        self._checkpoint.skip(pattern)


class InPlace(FromCheckpoint):
    """The tensors that `in_files` names are their files' own pages, mapped; the others are allocated. All are read once: those that lie in place
    to see that they hold numbers."""

    def __init__(self, checkpoint: Checkpoint, in_files: Mapping[str, Sequence[FilePart]], allocate: Allocate) -> None:
        super().__init__(checkpoint, allocate)
        self._in_files = in_files
        self._maps = {file: _map(file) for file in sorted({part.file for parts in in_files.values() for part in parts})}
        self._mapped = [_addresses(memory) for memory in self._maps.values()]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parts = self._in_files.get(name)
        if parts is None:
            return super().take(name, shape, dtype)
        tensor = (self._whole(*parts) if len(parts) == 1 else self._joined(parts)).view(dtype).view(shape)
        self.taken[name] = tensor
        return tensor

    def _whole(self, part: FilePart) -> torch.Tensor:
        return self._maps[part.file][part.start : part.start + part.num_bytes]

    def _joined(self, parts: Sequence[FilePart]) -> torch.Tensor:
        with ExitStack() as files:
            opened = []
            for part in parts:
                fd = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
                files.callback(os.close, fd)
                opened.append(Part(fd, part.start, part.num_bytes))
            mapped = MappedParts(opened)
        memory = pages.tensor_of(mapped)
        self._mapped.append(_addresses(memory))
        self.works.append(mapped.populate)
        return memory

    def _job(
        self,
        into: torch.Tensor,
        stored: Sequence[Stored],
        found: tuple[StoredTensor, ...],
        make: Make | None,
        is_cut: bool,
    ) -> Job:
        job = super()._job(into, stored, found, make, is_cut)
        is_there = any(start <= into.data_ptr() < end for start, end in self._mapped)
        return job._replace(is_there=is_there)


def _addresses(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes


def _map(file: Path) -> torch.Tensor:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return pages.map_file(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


class OnBundle:
    """Tensors in place, in memory that holds a bundle's bytes."""

    def __init__(self, bundle: Bundle, memory: torch.Tensor | None) -> None:
        self.jobs: list[Job] = []
        self.works: list[Callable[[], None]] = []
        self.taken: dict[str, torch.Tensor] = {}  # by name
        self.memory = memory
        self._places = {place.wanted.name: place for place in bundle.places}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].wanted.shape

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wanted = Wanted(name, NAMES[dtype], shape)
        place = self._places.get(name)
        if place is None or place.wanted != wanted:
            raise BundleError(f"it holds {place and place.wanted} where the model wants {wanted}")
        tensor = self.taken[name] = self._tensor(place, dtype)
        return tensor

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def skip(self, pattern: str) -> None:
        pass

    def _tensor(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        assert self.memory is not None
        return _tensor_at(self.memory, place)


class FromBundle(OnBundle):
    """The same tensors in memory of their own, to be filled by `jobs`."""

    def __init__(self, file: BundleFile, allocate: Allocate) -> None:
        super().__init__(file.bundle, None)
        self._path = file.path
        self._allocate = allocate

    def _tensor(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        wanted = place.wanted
        into = self._allocate(wanted.name, wanted.shape, dtype)
        stored = StoredTensor(self._path, wanted.dtype, wanted.shape, place.start, place.end)
        self.jobs.append(Job(f"{wanted.name} in {self._path.name}", (stored,), into))
        return into


class Arena:
    """Tensors one behind the other in `memory`, as a bundle has them."""

    def __init__(self, memory: torch.Tensor, bundle: Bundle) -> None:
        self._memory = memory
        self._places = {place.wanted.name: place for place in bundle.places}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        place = self._places[name]
        assert place.wanted == (name, NAMES[dtype], shape), f"{name} was planned as {place.wanted}"
        return self.tensor(place)

    def tensor(self, place: Place) -> torch.Tensor:
        return _tensor_at(self._memory, place)

    def jobs_from(self, file: BundleFile) -> Iterator[Job]:
        """Every tensor of another bundle with the same tensors."""
        for place in file.bundle.places:
            stored = StoredTensor(file.path, place.wanted.dtype, place.wanted.shape, place.start, place.end)
            into = self.tensor(self._places[place.wanted.name])
            yield Job(f"{place.wanted.name} in {file.path.name}", (stored,), into)


def _tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory[place.start : place.end].view(DTYPES[place.wanted.dtype]).view(place.wanted.shape)


def on_device(device: torch.device) -> Allocate:
    """Each tensor by the device's own allocator."""
    return lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device)
