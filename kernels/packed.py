"""A weight as it is stored, plain or packed, and what every kind of it can do: be one expert's, be unpacked.

Knows which kinds there are; their layouts are in the files of their names.
"""

import torch

from kernels.checks import FLOATS, ArgumentCheck
from kernels.fp8 import GROUP, Fp8Weight, unpack_fp8
from kernels.int4 import BLOCK, Int4Weight, unpack_int4
from kernels.mxfp4 import Mxfp4Weight, unpack_mxfp4_weight

Packed = Int4Weight | Mxfp4Weight | Fp8Weight
Weight = torch.Tensor | Packed


def num_experts(weight: Weight) -> int:
    return weight.shape[0] if isinstance(weight, torch.Tensor) else weight[0].shape[0]


def expert(weight: Weight, i: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix, unpacked, of a weight with experts in its first dimension."""
    if isinstance(weight, torch.Tensor):
        return weight[i]
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[i]
        return unpack(weight._replace(codes=weight.codes[i], scales=weight.scales[i], zeros=zeros), dtype)
    if isinstance(weight, Mxfp4Weight):
        return unpack(Mxfp4Weight(weight.codes[i], weight.scales[i]), dtype)
    return unpack(weight._replace(values=weight.values[i], scales=weight.scales[i]), dtype)


def unpack(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return a plain weight [..., rows, columns], columns as x has them."""
    if isinstance(weight, Mxfp4Weight):
        return unpack_mxfp4_weight(weight, dtype)
    if isinstance(weight, Fp8Weight):
        return unpack_fp8(weight, dtype)
    plain = unpack_int4(weight, dtype)
    if weight.permutation is None:
        return plain
    return plain.index_select(-1, weight.permutation.argsort())


def shape_of(weight: Weight) -> tuple[int, ...]:
    """[..., rows, columns], as the plain weight would have it."""
    if isinstance(weight, torch.Tensor):
        return tuple(weight.shape)
    if isinstance(weight, Fp8Weight):
        return tuple(weight.values.shape)
    return *weight.codes.shape[:-1], weight.columns


def parts_of(weight: Weight) -> list[torch.Tensor]:
    return [weight] if isinstance(weight, torch.Tensor) else [x for x in weight if isinstance(x, torch.Tensor)]


def is_sound(weight: Packed) -> bool:
    """True if its parts have the types and sizes that go with each other."""
    shape = shape_of(weight)
    if len(shape) < 2:
        return False
    *lead, rows, columns = shape
    if isinstance(weight, Fp8Weight):
        groups = (*lead, _groups(rows, weight.row_group), _groups(columns, weight.column_group))
        return (
            weight.values.dtype == torch.float8_e4m3fn
            and weight.values.stride()[-1] == 1
            and weight.scales.dtype == torch.float32
            and weight.scales.shape == groups
            and (weight.column_group % GROUP == 0 or weight.column_group >= columns)
            and (weight.input_scale is None or _is_one_number(weight.input_scale))
        )
    if weight.codes.dtype != torch.uint8 or weight.codes.stride()[-1] != 1 or weight.codes.shape[-1] != _bytes(columns):
        return False
    if isinstance(weight, Mxfp4Weight):
        return weight.scales.dtype == torch.uint8 and weight.scales.shape == (*lead, rows, columns // BLOCK)
    zeros, order = weight.zeros, weight.permutation
    return (
        weight.scales.dtype in FLOATS
        and weight.scales.shape == (*lead, rows, _groups(columns, weight.group))
        and (weight.group % BLOCK == 0 or weight.group >= columns)
        and (zeros is None or (zeros.dtype == torch.uint8 and zeros.shape == weight.scales.shape))
        and (order is None or (order.dtype == torch.int64 and order.shape == (columns,)))
    )


def require_weight(check: ArgumentCheck, name: str, weight: Weight, shape: str, dtype: torch.dtype) -> None:
    """`shape`: the words of the plain weight's dimensions, such as "rows columns"; `dtype` of a plain one."""
    words = shape.split()
    rows, columns = words[-2:]
    lead = " ".join(words[:-1])
    if isinstance(weight, torch.Tensor):
        check.tensor(name, weight, shape, (dtype,), dense=1)
    elif isinstance(weight, Fp8Weight):
        check.tensor(f"{name}.values", weight.values, shape, (torch.float8_e4m3fn,), dense=1)
        group = weight.column_group
        fits = group > 0 and weight.row_group > 0 and (group % GROUP == 0 or group >= check.size(columns))
        check.require(f"{name}.column_group", fits, f"is {group}, wanted a multiple of {GROUP}, or all columns")
        check.derive(f"{name}.row_groups", _groups(check.size(rows), weight.row_group), name)
        check.derive(f"{name}.column_groups", _groups(check.size(columns), group), name)
        groups = " ".join([*words[:-2], f"{name}.row_groups", f"{name}.column_groups"])
        check.tensor(f"{name}.scales", weight.scales, groups, (torch.float32,))
        if weight.input_scale is not None:
            is_one = _is_one_number(weight.input_scale)
            check.require(f"{name}.input_scale", is_one, "is not one fp32 number")
            check.tensor(f"{name}.input_scale", weight.input_scale.reshape(1), "1", (torch.float32,))
    else:
        check.agree(f"{name}.columns", columns, weight.columns)
        check.derive(f"{name}.bytes", _bytes(weight.columns), f"{name}.columns")
        check.tensor(f"{name}.codes", weight.codes, f"{lead} {name}.bytes", (torch.uint8,), dense=1)
        int4 = isinstance(weight, Int4Weight)
        group = weight.group if isinstance(weight, Int4Weight) else BLOCK
        fits = group > 0 and (group % BLOCK == 0 or group >= weight.columns)
        check.require(f"{name}.group", fits, f"is {group}, wanted a multiple of {BLOCK}, or all columns")
        check.derive(f"{name}.groups", _groups(weight.columns, group), f"{name}.group")
        check.tensor(f"{name}.scales", weight.scales, f"{lead} {name}.groups", FLOATS if int4 else (torch.uint8,))
        if isinstance(weight, Int4Weight) and weight.zeros is not None:
            check.tensor(f"{name}.zeros", weight.zeros, f"{lead} {name}.groups", (torch.uint8,))
        if isinstance(weight, Int4Weight) and weight.permutation is not None:
            check.tensor(f"{name}.permutation", weight.permutation, columns, (torch.int64,))


def _bytes(columns: int) -> int:
    return -(-columns // BLOCK) * (BLOCK // 2)


def _groups(size: int, group: int) -> int:
    return -(-size // group) if group > 0 else 0


def _is_one_number(x: torch.Tensor) -> bool:
    return x.numel() == 1 and x.dtype == torch.float32
