"""Conversions of quantizers' four-bit weights to the layout of kernels/matrices/int4.py.

Pure functions of tensors, called when a checkpoint is loaded; independent of files. All three store eight codes in a 32-bit word, the first in its
lowest bits. The differences are:

compressed-tensors   words along a row; zero points along a column; signed values, stored with 8 added
GPTQ                 the matrix transposed, words along its columns; zero points along rows, in the format's first version with 1 subtracted
AWQ                  the matrix transposed, words along rows, with the columns in the order 0 2 4 6 1 3 5 7 in each word; zero points as well
"""

from abc import ABC, abstractmethod

import torch

from pilotlight.engine.weights.stored_tensor import AxisRange

CODES = 8  # codes per word
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of each column in a word of AWQ

Dims = tuple[AxisRange, AxisRange]


class Int4Layout(ABC):
    """The stored tensors of a matrix [rows, columns], and their conversions."""

    codes_name, zeros_name, scales_name, g_idx_name = "qweight", "qzeros", "scales", "g_idx"
    is_row_wise = False  # whether rows of the matrix are rows of its tensors

    @abstractmethod
    def codes_dims(self, rows: AxisRange, columns: AxisRange) -> Dims:
        """Return the ranges of the stored tensor, in words, that contain these codes."""

    @abstractmethod
    def codes(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack words to [rows, columns] of 0 to 15; padding may add rows or columns at the end."""

    def zeros_dims(self, rows: AxisRange, groups: AxisRange) -> Dims:
        return groups, rows.over(CODES)

    def zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack zero points to [rows, groups]; padding may add rows at the end."""
        return unpack_words(words).T

    def scales_dims(self, rows: AxisRange, groups: AxisRange) -> Dims:
        return groups, rows

    def scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the scales as [rows, groups]."""
        return stored.T


class CompressedTensors(Int4Layout):
    codes_name, zeros_name, scales_name, g_idx_name = (
        "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx",
    )  # fmt: skip
    is_row_wise = True

    def codes_dims(self, rows: AxisRange, columns: AxisRange) -> Dims:
        return rows, columns.over(CODES)

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpack_words(words)

    def zeros_dims(self, rows: AxisRange, groups: AxisRange) -> Dims:
        return rows.over(CODES), groups

    def zeros(self, words: torch.Tensor) -> torch.Tensor:
        return unpack_words(words.T).T

    def scales_dims(self, rows: AxisRange, groups: AxisRange) -> Dims:
        return rows, groups

    def scales(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


class Gptq(Int4Layout):
    def __init__(self, version: int) -> None:
        self._added = 1 if version == 1 else 0

    def codes_dims(self, rows: AxisRange, columns: AxisRange) -> Dims:
        return columns.over(CODES), rows

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        return unpack_words(words.T)

    def zeros(self, words: torch.Tensor) -> torch.Tensor:
        return super().zeros(words) + self._added


class Awq(Int4Layout):
    def codes_dims(self, rows: AxisRange, columns: AxisRange) -> Dims:
        return columns, rows.over(CODES)

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(unpack_words(words), 1, (-1, CODES))[:, :, _AWQ_PLACES].flatten(1).T

    def zeros(self, words: torch.Tensor) -> torch.Tensor:
        return self.codes(words)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Unpack [rows, words] int32 to [rows, words * 8] uint8."""
    as_bytes = words.contiguous().view(torch.uint8)  # little-endian, so the byte with the first two codes comes first
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(1)
