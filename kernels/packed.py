"""A weight as it is stored, plain or packed, and what every kind of it can do: be one expert's, be unpacked.

Knows which kinds there are; their layouts are in the files of their names.
"""

import torch

from kernels.fp8 import Fp8Weight, unpack_fp8
from kernels.int4 import Int4Weight, unpack_int4
from kernels.mxfp4 import Mxfp4Weight, unpack_mxfp4_weight

Packed = Int4Weight | Mxfp4Weight | Fp8Weight
Weight = torch.Tensor | Packed


def num_experts(weight: Weight) -> int:
    return weight.shape[0] if isinstance(weight, torch.Tensor) else weight[0].shape[0]


def expert(weight: Weight, i: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a weight with experts in its first dimension, one expert's, unpacked."""
    if isinstance(weight, torch.Tensor):
        return weight[i]
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[i]
        return unpack(weight._replace(codes=weight.codes[i], scales=weight.scales[i], zeros=zeros), dtype)
    if isinstance(weight, Mxfp4Weight):
        return unpack(Mxfp4Weight(weight.codes[i], weight.scales[i]), dtype)
    return unpack(weight._replace(values=weight.values[i], scales=weight.scales[i]), dtype)


def unpack(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Its values as a plain weight [..., rows, columns], columns as x has them."""
    if isinstance(weight, Mxfp4Weight):
        return unpack_mxfp4_weight(weight, dtype)
    if isinstance(weight, Fp8Weight):
        return unpack_fp8(weight, dtype)
    plain = unpack_int4(weight, dtype)
    if weight.permutation is None:
        return plain
    return plain.index_select(-1, weight.permutation.argsort())
