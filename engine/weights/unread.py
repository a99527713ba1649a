"""Storage on nothing, of a checkpoint whose tensors have names and shapes and are never read: for a model that is only rehearsed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from engine.weights.bundle_file import BundleFile
from engine.weights.filling import Make
from engine.weights.reader import Stored, index_checkpoint, packed_file


class UnreadCheckpoint:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)

    @classmethod
    def open(cls, directory: Path) -> "UnreadCheckpoint":
        packed = packed_file(directory)
        if packed is None:
            return cls({name: stored.shape for name, stored in index_checkpoint(directory).items()})
        with BundleFile.open(packed) as file:
            return cls({place.wanted.name: place.wanted.shape for place in file.bundle.places})

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        pass

    def skip(self, pattern: str) -> None:
        pass
