"""The interface of a storage format of matrices, and the plain format.

A format knows which matrices of a checkpoint have it, and requests them from the loader, packed or unpacked. It reads nothing itself, except small
tensors that decide the layout (`WeightRequests.look`). A format with one matrix per tensor has `fill` and `lay_out`; a format with all experts of a
layer in one tensor has `fill_stack` and `lay_out_stack`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from pilotlight.engine.weights.shard import ExpertStack, MatrixPart
from pilotlight.engine.weights.staging import Make
from pilotlight.engine.weights.stored_tensor import ExpectedTensor
from pilotlight.kernels.matrices.weight import Weight

FLOATS = ("F32", "F16", "BF16")


class Index(Protocol):
    """The tensors of a checkpoint by name."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class WeightRequests(Index, Protocol):
    """The loader (loader.py) as a format uses it."""

    @property
    def device(self) -> torch.device: ...

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def look(self, expected: ExpectedTensor) -> torch.Tensor | None:
        """Read a small tensor at once, because the layout depends on its content.

        Returns None if its content is not available; config.json then decides.
        """

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of any type, which the caller fills with `fill`."""

    def fill(
        self, into: torch.Tensor, stored: Sequence[ExpectedTensor], make: Make | None, is_row_wise: bool = True
    ) -> None:
        """Request a later call of make(into, *stored), from any thread; if `make` is None, copy and convert.

        `is_row_wise`: rows of `into` depend only on the same rows of the stored tensors, so `make` may be called for runs of rows.
        """

    def skip(self, pattern: str) -> None:
        """Ignore redundant tensors, whose names match `pattern`."""


class WeightFormat(ABC):
    __slots__ = ()

    @abstractmethod
    def stays_packed(self, device: torch.device) -> bool:
        """True if the device's kernels decode this format; otherwise weights are unpacked during the load."""

    def lies_as_stored(self) -> bool:
        """True if packed weights mostly have the stored bytes, so that the checkpoint can be mapped.

        Otherwise each load rearranges the bytes.
        """
        return False

    @abstractmethod
    def holds(self, index: Index, name: str) -> bool:
        """True if the checkpoint has this matrix, or stack of matrices, in the format."""

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        """Request that the matrix is unpacked into `into`, [rows, columns]."""
        raise NotImplementedError

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        """True if `lay_out` can make one packed weight of the parts; otherwise the loader unpacks them."""
        return True

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Weight:
        """Request the parts as one weight, stacked and packed.

        `experts`: the number of experts into which the caller divides it.
        """
        raise NotImplementedError

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        """Request that all experts are unpacked into `into`, [experts, rows, columns]."""
        raise NotImplementedError

    def lay_out_stack(self, loader: WeightRequests, stack: ExpertStack) -> Weight:
        raise NotImplementedError


def as_stored(x: torch.Tensor, are_pairs: bool) -> torch.Tensor:
    """View [experts, rows, n] as [experts, rows / k, k, n], in the order of the stored rows.

    k is 2 if gate and up rows alternate there, else 1.
    """
    return torch.unflatten(x, 1, (2 if are_pairs else 1, -1)).transpose(1, 2)


def stacked_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}...{names[-1]}"


class PlainFormat(WeightFormat):
    """Plain matrices: one tensor each, or one transposed tensor for all experts of a layer."""

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
