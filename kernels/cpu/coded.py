"""The C library's products with quantized weights.

Such a weight has codes of four or eight bits with separate scales (codes.h), or consists of the blocks of a GGUF file (blocks.h).
"""

from typing import NamedTuple

import torch
from torch import Tensor, get_num_threads

from pilotlight.kernels.cpu.c_library import Library

INT4, _, MXFP4, INT8 = range(4)  # the numbers of the forms in codes.h
_BLOCK = 32  # columns per block
_MOST_STEPS = 2048  # most blocks per row of a weight that C multiplies
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALES = {INT4: _FLOATS, MXFP4: {torch.uint8: 3}, INT8: _FLOATS}


class Codes(NamedTuple):
    """One matrix in the layout that C reads."""

    codes: Tensor  # [rows, blocks * bytes of a block]
    scales: Tensor  # [rows, groups]
    zeros: Tensor | None  # [rows, groups] uint8
    columns: int
    group: int  # columns that share one scale: a number of whole blocks, or all columns
    form: int
    order: Tensor | None = None  # column i of the weight is multiplied with x[:, order[i]]


def linear(
    library: Library, x: Tensor, weight: Codes, bias: Tensor | None = None, wide_output: bool = False
) -> Tensor | None:
    """Multiply x [rows, columns] by the weight.

    Return [rows, outputs], or None if C cannot take the arguments. `wide_output`: return the result as fp32.
    """
    codes, scales, zeros, columns, group, form, order = weight
    function, scale_type = library.coded_linear.get(x.dtype), _SCALES[form].get(scales.dtype)
    rows, outputs = x.shape[0], codes.shape[0]
    if function is None or scale_type is None or not rows or -(-columns // _BLOCK) > _MOST_STEPS:
        return None
    for part in (codes, scales, zeros, bias, order):
        if part is not None and not (part.is_contiguous() and not part.data_ptr() & (part.itemsize - 1)):
            return None
    if order is not None:
        x = x.index_select(1, order)
    if x.data_ptr() & (x.itemsize - 1):
        return None
    y = x.new_empty((rows, outputs), dtype=torch.float32) if wide_output else x.new_empty((rows, outputs))
    failed = function(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), rows, outputs, columns, x.stride(0), group, form, scale_type, wide_output,
        get_num_threads(),
    )  # fmt: skip
    return None if failed else y


class BlockRows(NamedTuple):
    """Up to three stacked matrices with the same number of columns, in the layout that C reads."""

    matrices: tuple[Tensor, ...]  # [rows, bytes of a row] uint8
    kinds: tuple[int, ...]  # C's number of each matrix's format
    columns: int

    @property
    def rows(self) -> int:
        return sum(matrix.shape[0] for matrix in self.matrices)

    def addresses(self) -> tuple[int | None, ...]:
        """Return three addresses, None for each missing matrix."""
        return (*(matrix.data_ptr() for matrix in self.matrices), None, None)[:3]

    def sizes(self) -> tuple[int, int, int, int]:
        """Return the number of rows of each of three matrices, and one number with a byte for each format."""
        first, second, third = (*(matrix.shape[0] for matrix in self.matrices), 0, 0)[:3]
        return first, second, third, sum(kind << 8 * i for i, kind in enumerate(self.kinds))


def block_linear(
    library: Library,
    x: Tensor,
    weight: BlockRows,
    bias: Tensor | None = None,
    activation: int = 0,
    wide_output: bool = False,
) -> Tensor | None:
    """Compute ops.linear for a weight in blocks."""
    function = library.block_linear.get(x.dtype)
    (rows, columns), weight_rows = x.shape, weight.rows
    p_x, p_bias = x.data_ptr(), 0 if bias is None else bias.data_ptr()
    if function is None or not rows or (activation and weight_rows & 1) or (p_x | p_bias) & (x.itemsize - 1):
        return None
    outputs = weight_rows >> 1 if activation else weight_rows
    y = x.new_empty((rows, outputs), dtype=torch.float32) if wide_output else x.new_empty((rows, outputs))
    failed = function(
        p_x, *weight.addresses(), p_bias or None, y.data_ptr(), rows, columns, x.stride(0), *weight.sizes(), activation, wide_output,
        get_num_threads(),
    )  # fmt: skip
    return None if failed else y


def block_rows(
    library: Library, numbers: Tensor, weight: BlockRows, dtype: torch.dtype, scale: float = 1.0
) -> Tensor | None:
    """Compute ops.rows_of for a weight in blocks."""
    function = library.block_rows.get(dtype)
    is_taken = numbers.dtype == torch.int64 and numbers.is_contiguous() and not numbers.data_ptr() & 7
    if function is None or not is_taken or not weight.rows:
        return None
    count = numbers.shape[0]
    y = numbers.new_empty((count, weight.columns), dtype=dtype)
    function(
        *weight.addresses(), numbers.data_ptr(), y.data_ptr(), count, weight.columns, *weight.sizes(), scale, get_num_threads()
    )  # fmt: skip
    return y
