"""The C library's operations on weights in 12 bits (kernels/matrices/lossless.py).

The operations have checked the arguments. As in ops.py, each returns None for those that C cannot take.
"""

from typing import Protocol

import torch
from torch import Tensor, get_num_threads

from pilotlight.kernels.cpu.c_library import Library


class TwelveBitWeight(Protocol):
    """A weight in 12 bits (kernels/matrices/lossless.py), in the layout that the library reads."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def palettes(self) -> Tensor: ...

    @property
    def starts(self) -> Tensor: ...

    @property
    def escapes(self) -> Tensor: ...

    @property
    def columns(self) -> int: ...

    @property
    def experts(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def linear(
    library: Library,
    x: Tensor,
    weight: TwelveBitWeight,
    bias: Tensor | None = None,
    activation: int = 0,
    wide_output: bool = False,
) -> Tensor | None:
    """Compute ops.linear, with the same bits as with the plain weight."""
    dtype, (rows, columns) = x.dtype, x.shape
    weight_rows = weight.codes.shape[0]
    p_x, p_bias = x.data_ptr(), 0 if bias is None else bias.data_ptr()
    if (
        rows > library.most_rows.get(dtype, 0)
        or weight.experts
        or (activation and weight_rows & 1)
        or (p_x | p_bias) & (x.itemsize - 1)
    ):
        return None
    outputs = weight_rows >> 1 if activation else weight_rows
    y = x.new_empty((rows, outputs), dtype=torch.float32) if wide_output else x.new_empty((rows, outputs))
    by_type = library.lossless_linear if rows <= library.few_rows[dtype] else library.lossless_gemm
    lacks_memory = by_type[dtype](
        p_x, *_addresses(weight), p_bias or None, y.data_ptr(), rows, outputs, columns, x.stride(0), activation, wide_output,
        get_num_threads(),
    )  # fmt: skip
    return None if lacks_memory else y


def rows(
    library: Library, numbers: Tensor, weight: TwelveBitWeight, dtype: torch.dtype, scale: float = 1.0
) -> Tensor | None:
    """Return the rows `numbers` [n] int64, times `scale`, as [n, columns]."""
    function = library.lossless_rows.get(dtype)
    if function is None or numbers.dtype != torch.int64 or not numbers.is_contiguous() or not weight.codes.shape[0]:
        return None
    y = numbers.new_empty((numbers.shape[0], weight.columns), dtype=dtype)
    function(
        *_addresses(weight), numbers.data_ptr(), y.data_ptr(), numbers.shape[0], weight.columns, weight.codes.shape[0], scale,
        get_num_threads(),
    )  # fmt: skip
    return y


def unpack(library: Library, codes: Tensor, weight: TwelveBitWeight, dtype: torch.dtype) -> Tensor | None:
    """Unpack `codes`, which are those of `weight`, into [..., rows, columns]."""
    function = library.lossless_rows.get(dtype)
    if function is None:
        return None
    y = codes.new_empty(weight.shape, dtype=dtype)
    num_rows = codes.shape[0]
    function(
        *_addresses(weight), None, y.data_ptr(), num_rows, weight.columns, num_rows, 1.0, get_num_threads()
    )  # fmt: skip
    return y


def survey(library: Library, plain: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the palettes and starts of plain [rows, columns].

    Uses one thread, because it runs in the background.
    """
    if plain.data_ptr() & 1:
        return None
    num_rows, columns = plain.shape
    palettes = plain.new_empty((-(-num_rows // 8), 16), dtype=torch.uint8)
    counts = plain.new_empty(palettes.shape[0] + 1, dtype=torch.int32)
    library.lossless_survey(plain.data_ptr(), palettes.data_ptr(), counts.data_ptr(), num_rows, columns, 1)
    return palettes, counts.cumsum(0).to(torch.int32)


def encode(library: Library, plain: Tensor, into: TwelveBitWeight) -> bool | None:
    """Fill codes and escapes of a weight whose palettes and starts are set; return True when done."""
    if plain.data_ptr() & 1:
        return None
    codes, palettes, starts, escapes = _addresses(into)
    library.lossless_encode(plain.data_ptr(), palettes, starts, codes, escapes, *plain.shape, 1)
    return True


def join_planes(library: Library, into: Tensor, planes: bytes) -> bool:
    """Join `planes`, in the format of planes.py, into `into` [n]; return True when done."""
    library.join_planes(planes, into.data_ptr(), len(into))
    return True


def _addresses(weight: TwelveBitWeight) -> tuple[int, int, int, int]:
    return weight.codes.data_ptr(), weight.palettes.data_ptr(), weight.starts.data_ptr(), weight.escapes.data_ptr()
