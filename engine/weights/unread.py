"""Storage on nothing, of a checkpoint whose tensors have names, types and shapes and are never read: for a model that is only rehearsed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.weights.bundle_file import BundleFile
from engine.weights.filling import DTYPES, Make
from engine.weights.reader import Stored, index_checkpoint, packed_file


class Unread(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]


class UnreadCheckpoint:
    def __init__(self, tensors: Mapping[str, Unread]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def open(cls, directory: Path) -> "UnreadCheckpoint":
        packed = packed_file(directory)
        if packed is None:
            return cls(
                {name: Unread(stored.dtype, stored.shape) for name, stored in index_checkpoint(directory).items()}
            )
        with BundleFile.open(packed) as file:
            wanted = [place.wanted for place in file.bundle.places]
            return cls({one.name: Unread(one.dtype, one.shape) for one in wanted})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, stored: Stored, no_number: int | None = None) -> torch.Tensor:
        """Of weights that stay packed (engine/layers/weights.py): its type and shape alone."""
        name, shape, _ = stored
        return torch.empty(shape, dtype=DTYPES[self._tensors[name].dtype], device="meta")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fill(self, into: torch.Tensor, stored: Sequence[Stored], make: Make | None, is_cut: bool) -> None:
        pass

    def compute(self, work: Callable[[], None]) -> None:
        pass

    def skip(self, pattern: str) -> None:
        pass
