"""The interface of a storage format, and the plain format.

It says which matrices have the format, and requests them, packed or not. Both are requests to the loader: nothing is read here but what decides the
layout (`WeightRequests.look`). A format whose tensors contain one matrix each has `fill` and `lay_out`; one with all experts of a layer in one
tensor has `fill_stack` and `lay_out_stack`.
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
    """The loader (model_loader.py) as a format uses it."""

    @property
    def device(self) -> torch.device: ...

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor, on whose content the layout depends, at once.

        Returns None if there is nothing to read: config.json then decides.
        """

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return storage of any type, which the caller fills."""

    def fill(
        self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool = True
    ) -> None:
        """Call make(into, *stored), from any thread, after the storage is allocated.

        If rows of `into` come from the same rows of the stored tensors (`is_row_wise`), it is called for one run of rows after another.
        """

    def skip(self, pattern: str) -> None:
        """Ignore redundant tensors, whose names match."""


class WeightFormat(ABC):
    __slots__ = ()

    @abstractmethod
    def stays_packed(self, device: torch.device) -> bool:
        """True if the device's kernels decode such weights; otherwise they are unpacked when they are loaded."""

    def lies_as_stored(self) -> bool:
        """True if packed weights mostly have the stored bytes, so that a checkpoint's own pages can serve.

        Otherwise each load rearranges them.
        """
        return False

    @abstractmethod
    def holds(self, index: Index, name: str) -> bool:
        """True if the checkpoint has this matrix, or stack of matrices, in the format."""

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        """Unpack into [rows, columns]."""
        raise NotImplementedError

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        """True if `lay_out` can make one packed weight of the parts; otherwise they are unpacked."""
        return True

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Weight:
        """Return the parts, stacked and packed.

        `experts`: the number of experts among which they will be divided.
        """
        raise NotImplementedError

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        """Unpack into [experts, rows, columns]."""
        raise NotImplementedError

    def lay_out_stack(self, loader: WeightRequests, stack: ExpertStack) -> Weight:
        raise NotImplementedError


def as_stored(x: torch.Tensor, are_pairs: bool) -> torch.Tensor:
    """View [experts, rows, n] as [experts, rows / k, k, n], in a stack's order.

    k is 2 if gate and up rows alternate.
    """
    return torch.unflatten(x, 1, (2 if are_pairs else 1, -1)).transpose(1, 2)


def stacked_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}"


class PlainFormat(WeightFormat):
    """Plain matrices: a tensor each, or one for all experts of a layer, transposed."""

    __slots__ = ()

    def stays_packed(self, device: torch.device) -> bool:
        return False

    def holds(self, index: Index, name: str) -> bool:
        return True

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        loader.fill(into, [ExpectedTensor.of(f"{part.name}.weight", (part.rows, part.columns), FLOATS)], None)

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        stored = ExpectedTensor.of(stack.name, (stack.experts, stack.columns, stack.rows), FLOATS)
        ordered = as_stored(into, stack.are_pairs)

        def turn(into: torch.Tensor, stored: torch.Tensor) -> None:
            into.copy_(torch.unflatten(stored, 2, into.shape[1:3]).permute(0, 2, 3, 1))

        loader.fill(ordered, [stored], turn)


PLAIN = PlainFormat()
