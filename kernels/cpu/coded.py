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

    Return [rows, outputs], or None if C cannot take the arguments. `wide_output`: return the result, rounded to x's type, as fp32.
    """
    codes, scales, zeros, columns, group, form, order = weight
    dtype = x.dtype
    function, scale_type = library.coded_linear.get(dtype), _SCALES[form].get(scales.dtype)
    if function is None or scale_type is None or x.ndim != 2 or codes.ndim != 2 or group <= 0:
        return None
    rows, outputs, blocks, groups = x.shape[0], codes.shape[0], -(-columns // _BLOCK), -(-columns // group)
    if (
        not rows
        or x.shape[1] != columns
        or blocks > _MOST_STEPS
        or codes.dtype != (torch.int8 if form == INT8 else torch.uint8)
        or codes.shape[1] != blocks * (_BLOCK if form == INT8 else _BLOCK // 2)
        or scales.shape != (outputs, groups)
        or (group % _BLOCK and groups > 1)
        or (zeros is not None and not (zeros.dtype == torch.uint8 and zeros.shape == scales.shape))
        or (bias is not None and not (bias.dtype == dtype and bias.shape == (outputs,)))
        or (order is not None and not (order.dtype == torch.int64 and order.shape == (columns,)))
    ):
        return None
    for part in (codes, scales, zeros, bias, order):
        if part is not None and not (
            part.is_cpu and part.is_contiguous() and not part.data_ptr() & (part.itemsize - 1)
        ):
            return None
    if order is not None:
        x = x.index_select(1, order)
    if x.stride(1) != 1 or x.data_ptr() & (x.itemsize - 1):
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
    row_bytes: tuple[int, ...]
    columns: int

    @property
    def rows(self) -> int:
        return sum(matrix.shape[0] for matrix in self.matrices)

    def is_taken(self) -> bool:
        return all(
            matrix.ndim == 2
            and matrix.dtype == torch.uint8
            and matrix.is_cpu
            and matrix.is_contiguous()
            and matrix.shape[1] == row_bytes
            for matrix, row_bytes in zip(self.matrices, self.row_bytes, strict=True)
        )

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
    dtype = x.dtype
    function = library.block_linear.get(dtype)
    if function is None or x.ndim != 2 or not weight.is_taken():
        return None
    rows, columns = x.shape
    row_stride, column_stride = x.stride()
    weight_rows = weight.rows
    p_x, p_bias = x.data_ptr(), 0
    if not rows or columns != weight.columns or column_stride != 1 or (activation and weight_rows & 1):
        return None
    if bias is not None:
        p_bias = bias.data_ptr()
        if bias.dtype != dtype or bias.numel() != weight_rows or not (bias.is_cpu and bias.is_contiguous()):
            return None
    if (p_x | p_bias) & (x.itemsize - 1):
        return None
    outputs = weight_rows >> 1 if activation else weight_rows
    y = x.new_empty((rows, outputs), dtype=torch.float32) if wide_output else x.new_empty((rows, outputs))
    failed = function(
        p_x, *weight.addresses(), p_bias or None, y.data_ptr(), rows, columns, row_stride, *weight.sizes(), activation, wide_output,
        get_num_threads(),
    )  # fmt: skip
    return None if failed else y


def block_rows(
    library: Library, numbers: Tensor, weight: BlockRows, dtype: torch.dtype, scale: float = 1.0
) -> Tensor | None:
    """Compute ops.rows_of for a weight in blocks."""
    function = library.block_rows.get(dtype)
    if (
        function is None
        or numbers.ndim != 1
        or numbers.dtype != torch.int64
        or not (numbers.is_cpu and numbers.is_contiguous())
        or numbers.data_ptr() & 7
        or not weight.is_taken()
        or not weight.rows
    ):
        return None
    count = numbers.shape[0]
    y = numbers.new_empty((count, weight.columns), dtype=dtype)
    function(
        *weight.addresses(), numbers.data_ptr(), y.data_ptr(), count, weight.columns, *weight.sizes(), scale, get_num_threads()
    )  # fmt: skip
    return y
