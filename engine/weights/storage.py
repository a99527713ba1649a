"""Where a model's tensors lie while it is laid out, and how their bytes come there: the forms of `layers.weights.Storage`.

A model is laid out twice where memory is to be had first: once on nothing, to learn what it asks for, once for good. Knows tensors and jobs; refuses
to know how jobs are done (filling.py) and when.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.weights.bundle import Bundle, BundleError, Place, Wanted
from engine.weights.bundle_file import BundleFile
from engine.weights.filling import DTYPES, NAMES, Job, Make
from engine.weights.reader import Checkpoint, Stored, StoredTensor

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
META = torch.device("meta")


class Plan:
    """On nothing: `wanted` are the tensors that the model asks for, in order."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.wanted: list[Wanted] = []
        self._checkpoint = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.wanted.append(Wanted(name, NAMES[dtype], shape))
        return torch.empty(shape, dtype=dtype, device=META)

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        pass

    def skip(self, pattern: str) -> None:
        pass


class FromCheckpoint:
    """Memory that is to be filled from a checkpoint, by the `jobs` and `works` noted here."""

    def __init__(self, checkpoint: Checkpoint, allocate: Allocate) -> None:
        self.jobs: list[Job] = []
        self.works: list[Callable[[], None]] = []
        self._checkpoint = checkpoint
        self._allocate = allocate

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._allocate(name, shape, dtype)

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        found = tuple(self._checkpoint.find(*one) for one in stored)
        # the last: of packed weights the scales, the only ones that can be no number
        self.jobs.append(Job(f"{stored[-1][0]} in {found[-1].file.name}", found, into, make, is_cut))

    def compute(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def skip(self, pattern: str) -> None:
        self._checkpoint.skip(pattern)


class FromBundle:
    """Tensors that a bundle holds as they are: with `allocate` in memory of their own, to be filled by `jobs`, else in place, in a map of it."""

    def __init__(self, file: BundleFile, allocate: Allocate | None) -> None:
        self.jobs: list[Job] = []
        self.works: list[Callable[[], None]] = []
        self.memory: torch.Tensor | None = None  # where the tensors are in place
        self._file = file
        if allocate is None:
            self.memory = file.map()
            allocate = Arena(self.memory, file.bundle).take
        self._allocate = allocate
        self._places = {place.wanted.name: place for place in file.bundle.places}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].wanted.shape

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wanted = Wanted(name, NAMES[dtype], shape)
        place = self._places.get(name)
        if place is None or place.wanted != wanted:
            raise BundleError(f"it holds {place and place.wanted} where the model wants {wanted}")
        into = self._allocate(name, shape, dtype)
        if self.memory is None:
            stored = StoredTensor(self._file.path, wanted.dtype, shape, place.start, place.end)
            self.jobs.append(Job(f"{name} in {self._file.path.name}", (stored,), into))
        return into

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def skip(self, pattern: str) -> None:
        pass


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
        return self._memory[place.start : place.end].view(DTYPES[place.wanted.dtype]).view(place.wanted.shape)

    def jobs_from(self, file: BundleFile) -> Iterator[Job]:
        """Every tensor of another bundle with the same tensors."""
        for place in file.bundle.places:
            stored = StoredTensor(file.path, place.wanted.dtype, place.wanted.shape, place.start, place.end)
            into = self.tensor(self._places[place.wanted.name])
            yield Job(f"{place.wanted.name} in {file.path.name}", (stored,), into)


def on_device(device: torch.device) -> Allocate:
    """Each tensor by the device's own allocator."""
    return lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device=device)
