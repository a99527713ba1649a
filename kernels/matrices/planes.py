"""bf16 as two planes of bytes: the exponents of all values, then their signs and mantissas."""

import torch
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import lossless as native
from pilotlight.kernels.dispatch import operation


def split_planes(values: Tensor) -> Tensor:
    """Split values [n] bf16 into [2 n] uint8."""
    bits = values.view(torch.int16)
    exponents = (bits >> 7).to(torch.uint8)  # the cast keeps the lowest eight bits
    others = bits & 0x7F | bits >> 8 & 0x80
    return torch.cat((exponents, others.to(torch.uint8)))


def _check_joined(check: ArgumentCheck, into: Tensor, planes: bytes) -> None:
    check.tensor("into", into, "values", (torch.bfloat16,), dense=1)
    check.require("planes", len(planes) == into.nbytes, f"has {len(planes)} bytes, wanted {into.nbytes}")


@operation(_check_joined, native=native.join_planes)
def join_planes(into: Tensor, planes: bytes) -> bool:
    """Join planes [2 n] to values in `into` [n] bf16."""
    exponents, others = torch.frombuffer(bytearray(planes), dtype=torch.uint8).to(torch.int16).view(2, -1)
    into.view(torch.int16).copy_(exponents << 7 | others & 0x7F | others << 8 & -0x8000)
    return True
