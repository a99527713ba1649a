"""A checkpoint whose tensors have names and shapes and are never read: for a model that is only rehearsed."""

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.weights.reader import CheckpointReader, StoredTensor, index_checkpoint


class UnreadCheckpoint(CheckpointReader):
    def __init__(self, index: Mapping[str, StoredTensor]) -> None:
        self._index = dict(index)

    @classmethod
    def open(cls, directory: Path) -> "UnreadCheckpoint":
        return cls(index_checkpoint(directory))

    def expect_finite(self, name: str, values: torch.Tensor) -> None:
        pass

    def skip(self, pattern: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _source(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=next(iter(dtypes.values())), device="meta")

    def _count(self, name: str) -> None:
        pass

    def _let_go(self, name: str) -> None:
        pass
