"""Products of the C library with weights that are kept in codes of four or eight bits (codes.h), whatever class of weight has them."""

from typing import NamedTuple

import torch
from torch import Tensor, get_num_threads

from pilotlight.kernels.cpu.c_library import Library

INT4, _, MXFP4, INT8 = range(4)  # codes.h
_BLOCK = 32  # columns
_MOST_STEPS = 2048  # blocks of a row, at least
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALES = {INT4: _FLOATS, MXFP4: {torch.uint8: 3}, INT8: _FLOATS}


class Codes(NamedTuple):
    """One matrix as C reads it."""

    codes: Tensor  # [rows, blocks * bytes of a block]
    scales: Tensor  # [rows, groups]
    zeros: Tensor | None  # [rows, groups] uint8
    columns: int
    group: int  # columns under one scale: whole blocks, or all
    form: int
    order: Tensor | None = None  # of columns: column i is for x[:, order[i]]


def linear(
    library: Library, x: Tensor, weight: Codes, bias: Tensor | None = None, wide_output: bool = False
) -> Tensor | None:
    """x [rows, columns] -> [rows, outputs]. `wide_output`: the result, rounded to x's type, as fp32. Returns None for what C cannot take."""
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
