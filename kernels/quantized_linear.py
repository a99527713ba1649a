"""Products with weights in four and eight bits, decoded on the way; FP8's activations are rounded too, by a pass of its own.

Knows the formats by their types (kernels/int4.py, mxfp4.py, fp8.py); refuses to know checkpoints. The torch forms unpack the whole weight for every
call: they say what is right, and a CPU that serves unpacks once, when it loads (4096 x 4096 in INT4 and one row on a thread of Zen 5: 58 ms, unpacked
2.6).
"""

import torch
import torch.nn.functional as F

from kernels.checks import FLOATS, ArgumentCheck, placed
from kernels.dispatch import operation
from kernels.fp8 import LARGEST, TINY, Fp8Weight, activation_group, spread, unpack_blocks, unpack_fp8
from kernels.int4 import Int4Weight, unpack_int4
from kernels.mxfp4 import Mxfp4Weight, unpack_mxfp4_weight
from kernels.packed import Packed, is_sound, parts_of, require_weight, shape_of


def _check(operation: str, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> None:
    shape = shape_of(weight)
    if not (
        x.dim() == len(shape) == 2
        and x.dtype in FLOATS
        and x.shape[1] == shape[1]
        and x.stride()[1] == 1
        and is_sound(weight)
        and (bias is None or (bias.dtype == x.dtype and bias.shape == shape[:1] and bias.is_contiguous()))
        and placed(x, bias, *parts_of(weight))
    ):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens columns", dense=1)
        require_weight(check, "weight", weight, "rows columns", x.dtype)
        if bias is not None:
            check.tensor("bias", bias, "rows", (x.dtype,), dense=1)


@operation(_check, triton="linear")
def int4_linear(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, rows]"""
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    return F.linear(x, unpack_int4(weight, x.dtype), bias)


@operation(_check, triton="linear")
def mxfp4_linear(x: torch.Tensor, weight: Mxfp4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, rows]"""
    return F.linear(x, unpack_mxfp4_weight(weight, x.dtype), bias)


@operation(_check, triton="fp8_linear")
def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, rows]"""
    values, scales = quantise_fp8(x, activation_group(weight), weight.input_scale)
    wide = unpack_blocks(values, scales, 1, activation_group(weight), torch.float32)
    product = F.linear(wide, unpack_fp8(weight, torch.float32), None if bias is None else bias.float())
    return product.to(x.dtype)


def _check_activations(operation: str, x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> None:
    if not (
        x.dim() == 2
        and x.dtype in FLOATS
        and group > 0
        and (scale is None or (scale.numel() == 1 and scale.dtype == torch.float32))
        and placed(x, scale)
    ):
        check = ArgumentCheck(operation)
        check.tensor("x", x, "tokens columns")
        check.require("group", group > 0, f"is {group}, wanted at least one column under a scale")
        if scale is not None:
            check.require("scale", scale.numel() == 1, f"has {scale.numel()} numbers, wanted one for all")
            check.tensor("scale", scale.reshape(1), "1", (torch.float32,))


@operation(_check_activations, triton="fp8_linear")
def quantise_fp8(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, columns] -> values [tokens, columns] float8_e4m3fn, scales [tokens, groups] fp32. With a `scale` given, it is everybody's, and what
    lies beyond the largest number becomes that."""
    tokens, columns = x.shape
    groups = -(-columns // group)
    if scale is None:
        padded = F.pad(x.float(), (0, groups * group - columns)).view(tokens, groups, group)
        scales = padded.abs().amax(-1).clamp(min=TINY) / LARGEST
    else:
        scales = scale.expand(tokens, groups).contiguous()
    wide = x.float() / spread(scales, 1, group, tokens, columns)
    return wide.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
