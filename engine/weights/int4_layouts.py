"""Four-bit weights as quantizers write them, brought into the one layout of kernels/int4.py when a checkpoint is loaded.

Pure functions of tensors; refuses to know files. All three keep eight codes in a 32-bit word, the first in its lowest bits. What differs:

compressed-tensors   words along a row; zero points along a column; signed values, stored with 8 added
GPTQ                 the matrix transposed, words along its columns; zero points along rows, one too small in the format's first version
AWQ                  the matrix transposed, words along rows, and in each of them the columns in the order 0 2 4 6 1 3 5 7; zero points alike
"""

import torch

from kernels.int4 import Int4Weight, pack_int4

CODES = 8  # in a word
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ's a column is


def from_compressed_tensors(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None, columns: int
) -> Int4Weight:
    """packed [rows, columns / 8] int32, scales [rows, groups], zeros [rows / 8, groups] int32, g_idx [columns]: each column's group."""
    rows, groups = scales.shape
    codes = unpack_words(packed)[:, :columns]
    unpacked = None if zeros is None else unpack_words(zeros.T)[:, :rows].T
    return _grouped(codes, scales, unpacked, g_idx, -(-columns // groups))


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    group: int,
    version: int,
) -> Int4Weight:
    """qweight [columns / 8, rows] int32, qzeros [groups, rows / 8] int32, scales [groups, rows], g_idx [columns]. Version 1 stores zero points minus
    one."""
    zeros = unpack_words(qzeros)[:, : scales.shape[1]].T
    if version == 1:
        zeros = zeros + 1
    return _grouped(unpack_words(qweight.T), scales.T, zeros, g_idx, group)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int) -> Int4Weight:
    """qweight [columns, rows / 8] int32, qzeros [groups, rows / 8] int32, scales [groups, rows]."""
    rows = scales.shape[1]
    codes, zeros = (
        torch.unflatten(unpack_words(words), 1, (-1, CODES))[:, :, _AWQ_PLACES].flatten(1)[:, :rows]
        for words in (qweight, qzeros)
    )
    return _grouped(codes.T, scales.T, zeros.T, None, group)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """[rows, words] int32 -> [rows, words * 8] uint8"""
    as_bytes = words.contiguous().view(torch.uint8)  # little-endian: the byte with the first two codes comes first
    return torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(1)


def _grouped(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None, group: int
) -> Int4Weight:
    """codes [rows, columns], scales and zeros [rows, groups]. Columns whose groups are not next to one another are sorted by group;
    g_idx puts `group` of them into each."""
    columns = codes.shape[1]
    permutation = None
    if g_idx is not None:
        in_order = torch.arange(columns, device=g_idx.device) // group
        if not torch.equal(g_idx.long(), in_order):
            permutation = g_idx.argsort(stable=True)
            codes = codes[:, permutation]
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    return Int4Weight(
        pack_int4(codes),
        scales.contiguous(),
        None if zeros is None else zeros.contiguous(),
        columns,
        group,
        permutation,
    )
