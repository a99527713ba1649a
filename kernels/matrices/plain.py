"""A plain weight: the values themselves, in the type used to compute."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.elementwise.rows import rows_of
from pilotlight.kernels.matrices.linear import gated_linear, linear, logits
from pilotlight.kernels.matrices.weight import GatedActivation, Operands, Weight, plain_operands


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeight(Weight):
    of_rows = ("values",)
    values: Tensor  # [..., rows, columns]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.values, bias)

    def gated(self, x: Tensor, bias: Tensor | None, activation: GatedActivation) -> Tensor:
        return gated_linear(x, self.values, bias, activation)

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(hidden, self.values)

    def rows(self, numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return rows_of(self.values, numbers, scale)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        check.tensor(f"{name}.values", self.values, shape, (dtype,), dense=1)

    def operands(self) -> Operands:
        return plain_operands(self.values)
