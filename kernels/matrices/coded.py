"""Weights in codes of four or eight bits with scales, which C multiplies without unpacking.

See kernels/cpu/coded.py.
"""

from abc import abstractmethod
from functools import partial
from typing import Any

from torch import Tensor

from pilotlight.kernels.cpu import coded
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.matrices.weight import Weight, check_product


class CodedWeight(Weight):
    """A weight that C multiplies without unpacking it."""

    __slots__ = ()

    @abstractmethod
    def codes_of_rows(self) -> coded.Codes:
        """Return the tensors and sizes of a weight of one matrix, which is not split by experts."""

    def logits(self, hidden: Tensor) -> Tensor:
        return coded_logits(hidden, self)


def native_linear(library: Library, x: Tensor, weight: CodedWeight, *further: Any, **named: Any) -> Tensor | None:
    """Compute coded.linear with the parts of the weight."""
    return coded.linear(library, x, weight.codes_of_rows(), *further, **named)


@operation(check_product, native=partial(native_linear, wide_output=True))
def coded_logits(hidden: Tensor, weight: CodedWeight) -> Tensor:
    """Return fp32 logits [rows, vocab] of hidden [rows, columns]."""
    return weight.linear(hidden).float()
