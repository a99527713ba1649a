"""What a storage format can do: say which matrices a checkpoint keeps in it, and request them, packed as kernels want them or unpacked.

Both are requests to the loader: nothing is read here but what decides the layout (`WeightRequests.look`). A format whose tensors hold one matrix
each has `fill` and `lay_out`; one that keeps all experts of a layer together has `fill_stack` and `lay_out_stack`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from pilotlight.engine.weights.checkpoint import ExpectedTensor
from pilotlight.engine.weights.shard import ExpertStack, MatrixPart
from pilotlight.engine.weights.staging import Make
from pilotlight.kernels.matrices.weight import Weight

FLOATS = ("F32", "F16", "BF16")


class Index(Protocol):
    """The tensors of a checkpoint by name."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class WeightRequests(Index, Protocol):
    """The loader (model_loader.py), as a format uses it."""

    @property
    def device(self) -> torch.device: ...

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor at once, on whose content the layout depends; None where there is nothing to read: config.json is believed then."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return storage of any type, that the caller fills."""

    def fill(
        self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool = True
    ) -> None:
        """Call make(into, *stored) once the storage is there, from any thread; where rows of `into` come from the same rows of the stored tensors
        (`is_row_wise`), for one run of rows after another."""

    def skip(self, pattern: str) -> None:
        """Let redundant tensors, whose names match, stay unread."""


class WeightFormat(ABC):
    __slots__ = ()

    @abstractmethod
    def stays_packed(self, device: torch.device) -> bool:
        """Tell whether kernels of the device decode such weights while they read them. Elsewhere they are unpacked once, when they are loaded."""

    def lies_as_stored(self) -> bool:
        """Tell whether what stays packed has the stored bytes, for the most part: a checkpoint's own pages can be it. Else each load arranges it."""
        return False

    @abstractmethod
    def holds(self, index: Index, name: str) -> bool:
        """Tell whether the checkpoint has this matrix, or stack of matrices, in the format."""

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        """Unpack into [rows, columns]."""
        raise NotImplementedError

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        """Tell whether `lay_out` can make one packed weight of the parts. Else they are unpacked."""
        return True

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Weight:
        """Return the parts, one below the other, packed. `experts`: they will be divided among so many."""
        raise NotImplementedError

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        """Unpack into [experts, rows, columns]."""
        raise NotImplementedError

    def lay_out_stack(self, loader: WeightRequests, stack: ExpertStack) -> Weight:
        raise NotImplementedError


def as_stored(x: torch.Tensor, are_pairs: bool) -> torch.Tensor:
    """[experts, rows, n] -> [experts, rows / k, k, n], a view with rows in a stack's order: gate and up taking turns, where they do (k is 2)."""
    return torch.unflatten(x, 1, (2 if are_pairs else 1, -1)).transpose(1, 2)


def stacked_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}"
