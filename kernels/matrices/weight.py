"""A weight matrix in its stored form, with the methods of every form: multiply, get rows, unpack.

Plain ones are in kernels/matrices/plain.py, packed ones in files named after their formats. A new form is a new subclass; no list has to be changed.
This module is independent of checkpoints (engine/weights/formats converts them).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pilotlight.kernels.checks import INDICES, ArgumentCheck

GatedActivation = Callable[[Tensor], Tensor]  # [tokens, 2 * intermediate] -> [tokens, intermediate]
PLAIN, FP8, INT4, MXFP4 = range(4)  # as in kernels/triton/matrices/tiles.py


class Operands(NamedTuple):
    """The arguments for a weight in Triton's products.

    Strides are counted in elements; strides between experts are 0 for a single matrix.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    rows: int
    columns: int
    weight_expert: int
    weight_row: int
    scales_expert: int
    scales_row: int
    row_group: int
    column_group: int
    format: int
    has_zeros: bool
    is_permuted: bool


class Weight(ABC):
    """One matrix [rows, columns], or one per expert, with the experts as an additional first dimension.

    Subclasses are frozen dataclasses.
    """

    __slots__ = ()
    of_rows: ClassVar[
        tuple[str, ...]
    ]  # names of the tensors that have a dimension of rows, after that of experts if any

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the plain weight: [..., rows, columns]."""

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [tokens, columns] by the weight; return [tokens, rows]."""

    @abstractmethod
    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the plain weight, with columns in the order of x."""

    @abstractmethod
    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        """Raise ArgumentError for the part that is wrong. `shape`: dimension names such as "rows columns"."""

    def rows(self, numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return the rows `numbers` [n], times `scale`, as [n, columns]."""
        return self._each(lambda part: part[numbers]).unpack(dtype) * scale

    def expert(self, i: int) -> Self:
        """Return one expert's matrix of a weight whose first dimension is experts."""
        return self._each(lambda part: part[i])

    def by_expert(self, experts: int) -> Self:
        """Return a view of [experts * rows, columns] as [experts, rows, columns]."""
        return self._each(lambda part: torch.unflatten(part, 0, (experts, -1)))

    def operands(self) -> Operands:
        """Return the arguments for Triton's products.

        Raises NotImplementedError for a form that they do not support.
        """
        raise NotImplementedError(f"Triton's products do not support {type(self).__name__}")

    def gated(self, x: Tensor, bias: Tensor | None, activation: GatedActivation) -> Tensor:
        """Return the activation of x [tokens, columns] times the weight, whose gate rows precede its up rows."""
        return activation(self.linear(x, bias))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [rows, vocab] of hidden [rows, columns].

        Torch and Triton round them to the type of `hidden` first; C does not.
        """
        return self.linear(hidden).float()

    @property
    def parts(self) -> list[Tensor]:
        """Return the tensors in which the weight is stored."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def expert_parts(self) -> list[Tensor]:
        """Return the tensors whose first dimension is that of experts."""
        return [part for name in self.of_rows if (part := getattr(self, name)) is not None]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        parts = {name: getattr(self, name) for name in self.of_rows}
        changed = {name: None if part is None else change(part) for name, part in parts.items()}
        return replace(self, **changed)  # type: ignore[type-var]


def check_product(check: ArgumentCheck, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Check the arguments of an operation that multiplies by a packed weight."""
    check.tensor("x", x, "tokens columns", dense=1)
    weight.require(check, "weight", "rows columns", x.dtype)
    if bias is not None:
        check.tensor("bias", bias, "rows", (x.dtype,), dense=1)


def check_gated(
    check: ArgumentCheck, x: Tensor, weight: Weight, bias: Tensor | None, activation: GatedActivation
) -> None:
    """Check the arguments of an operation that multiplies by a packed weight and applies an activation."""
    check_product(check, x, weight, bias)


def check_rows(check: ArgumentCheck, numbers: Tensor, weight: Weight, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Check the arguments of an operation that gets rows of a packed weight."""
    check.tensor("numbers", numbers, "n", INDICES)
    weight.require(check, "weight", "rows columns", dtype)


def lay_operands(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    columns: int,
    groups: tuple[int, int],
    format: int,
    is_permuted: bool = False,
) -> Operands:
    """Describe tensors [..., rows, bytes or values] and [..., row groups, column groups] for Triton.

    `groups`: the rows and columns that share a scale.
    """
    experts = values.dim() == 3
    return Operands(
        values, scales, values if zeros is None else zeros, values.shape[-2], columns,
        values.stride(0) if experts else 0, values.stride(-2),
        scales.stride(0) if experts else 0, scales.stride(-2),
        *groups, format, zeros is not None, is_permuted,
    )  # fmt: skip


def plain_operands(values: Tensor) -> Operands:
    assert values.stride(-1) == 1, "columns must be contiguous"
    return lay_operands(values, values, None, values.shape[-1], (1, 1), PLAIN)


def num_groups(size: int, group: int) -> int:
    return -(-size // group) if group > 0 else 0
