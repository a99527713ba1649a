"""Weights in the quantized blocks of GGUF files, multiplied without conversion.

Rows consist of blocks, each with codes and their scales. This module knows the blocks of each kind, from ggml's ggml-common.h and the reference forms
in ggml-quants.c (https://github.com/ggml-org/ggml), and is independent of files (engine/weights/formats/gguf.py reads them). A weight is up to three
stacked matrices, which may differ in kind: queries, keys and values, or gates and ups, need not be copied into one. Products round x to eight bits
with one scale for each 32 columns. The C library multiplies codes and bytes as integers (kernels/cpu/blocks.c), so a row has the same bits in any
batch; torch multiplies the decoded weight and the rounded x. There is no form for GPUs: they get such weights unpacked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import coded
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.activation import gated_native
from pilotlight.kernels.matrices.weight import GatedActivation, Weight, check_gated, check_product, check_rows

MOST_JOINED = 3
ROUNDED_COLUMNS = 32  # columns of x that share a scale
_LEAST = 2.0**-100  # groups of smaller magnitudes become zero: the inverse of their scale would be infinite


class BlockKind(NamedTuple):
    columns: int  # columns of a block
    num_bytes: int


# The order of kinds is that of C (kernels/cpu/blocks.h).
BLOCK_KINDS = {
    "q4_0": BlockKind(32, 18), "q4_1": BlockKind(32, 20), "q5_0": BlockKind(32, 22), "q5_1": BlockKind(32, 24), "q8_0": BlockKind(32, 34),
    "iq4_nl": BlockKind(32, 18), "q3_k": BlockKind(256, 110), "q4_k": BlockKind(256, 144), "q5_k": BlockKind(256, 176), "q6_k": BlockKind(256, 210),
    "mxfp4": BlockKind(32, 17),
}  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(BLOCK_KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight(Weight):
    of_rows = ("first",)  # only a weight of one matrix is split or indexed
    first: Tensor  # [..., rows, bytes of a row] uint8
    second: Tensor | None
    third: Tensor | None
    kinds: tuple[str, ...]  # kind of each matrix
    columns: int

    @classmethod
    def joined(cls, matrices: Sequence[Tensor], kinds: Sequence[str], columns: int) -> "BlockWeight":
        """Return a weight of stacked matrices [rows, bytes of a row] of these kinds."""
        first, second, third = (*matrices, None, None)[:MOST_JOINED]
        assert first is not None
        return cls(first, second, third, tuple(kinds), columns)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return tuple(matrix for matrix in (self.first, self.second, self.third) if matrix is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.first.shape[:-2], sum(matrix.shape[-2] for matrix in self.matrices), self.columns

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return block_linear(x, self, bias)

    def gated(self, x: Tensor, bias: Tensor | None, activation: GatedActivation) -> Tensor:
        return block_gated_linear(x, self, bias, activation)

    def logits(self, hidden: Tensor) -> Tensor:
        return block_logits(hidden, self)

    def rows(self, numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return block_rows(numbers, self, dtype, scale)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the plain weight, computed in fp32 and rounded once."""
        parts = [unpack(kind, matrix) for kind, matrix in zip(self.kinds, self.matrices, strict=True)]
        return torch.cat(parts, dim=-2).to(dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        lead = " ".join("_" for _ in shape.split()[:-1])
        for word, size in zip(shape.split(), self.shape, strict=True):
            if word != "_":
                check.agree(f"{name}.{word}", word, size)
        has_all = len(self.kinds) == len(self.matrices)
        check.require(f"{name}.kinds", has_all, f"are {len(self.kinds)}, and there are {len(self.matrices)} matrices")
        for i, (kind, matrix) in enumerate(zip(self.kinds, self.matrices, strict=True)):
            known = ", ".join(BLOCK_KINDS)
            check.require(f"{name}.kinds", kind in BLOCK_KINDS, f"has {kind!r}, wanted one of {known}")
            block = BLOCK_KINDS[kind].columns
            check.require(
                f"{name}.columns", self.columns % block == 0, f"is {self.columns}, wanted a multiple of {block}"
            )
            check.derive(f"{name}.bytes{i}", row_bytes(kind, self.columns), f"{name}.columns")
            part = f"{name}.{('first', 'second', 'third')[i]}"
            check.tensor(part, matrix, f"{lead} {name}.bytes{i}", (torch.uint8,), dense=2)

    def rows_of_blocks(self) -> coded.BlockRows:
        """Return the matrices in the layout that C reads."""
        return coded.BlockRows(self.matrices, tuple(_NUMBERS[kind] for kind in self.kinds), self.columns)


def row_bytes(kind: str, columns: int) -> int:
    """Return the number of bytes of a row. `columns` must be a multiple of the block's columns."""
    block = BLOCK_KINDS[kind]
    return columns // block.columns * block.num_bytes


def unpack(kind: str, stored: Tensor) -> Tensor:
    """Decode rows of bytes [..., rows, blocks * bytes] to fp32 [..., rows, columns]."""
    return _VALUES[kind](blocks_of(kind, stored)).flatten(-2)


def blocks_of(kind: str, stored: Tensor) -> Tensor:
    """Split [..., blocks * bytes] into [..., blocks, bytes]."""
    return torch.unflatten(stored, -1, (-1, BLOCK_KINDS[kind].num_bytes))


def rounded(x: Tensor) -> Tensor:
    """Return x [..., columns] in fp32, rounded to eight bits with a scale for each 32 columns.

    A scale is a 127th of the largest magnitude in the columns. A number that is not finite makes its 32 columns NaN.
    """
    groups = torch.unflatten(x.float(), -1, (-1, ROUNDED_COLUMNS))
    largest = groups.abs().amax(-1, keepdim=True)
    steps = (groups * (127 / largest)).round().where(largest >= _LEAST, 0.0)
    return (steps * (largest / 127)).where(largest.isfinite(), torch.nan).flatten(-2)


def _product(x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(rounded(x), weight.unpack(torch.float32), None if bias is None else bias.float())


def _native(library: Library, x: Tensor, weight: BlockWeight, *further: Any, **named: Any) -> Tensor | None:
    """Compute coded.block_linear with the matrices of the weight."""
    return coded.block_linear(library, x, weight.rows_of_blocks(), *further, **named)


@operation(check_product, native=_native)
def block_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [tokens, columns] by the weight; return [tokens, rows]."""
    return _product(x, weight, bias).to(x.dtype)


@operation(check_gated, native=gated_native(_native))
def block_gated_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None, activation: GatedActivation) -> Tensor:
    """Return the activation [tokens, intermediate] of x [tokens, columns] times the weight.

    weight [2 * intermediate, columns]: gates, then ups.
    """
    return activation(_product(x, weight, bias).to(x.dtype))


@operation(check_product, native=partial(_native, wide_output=True))
def block_logits(hidden: Tensor, weight: BlockWeight) -> Tensor:
    """Return fp32 logits [rows, vocab] of hidden [rows, columns]."""
    return _product(hidden, weight)


def _rows_native(library: Library, numbers: Tensor, weight: BlockWeight, *further: Any) -> Tensor | None:
    return coded.block_rows(library, numbers, weight.rows_of_blocks(), *further)


@operation(check_rows, native=_rows_native)
def block_rows(numbers: Tensor, weight: BlockWeight, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return the rows `numbers` [n], times `scale`, as [n, columns]."""
    is_one = len(weight.matrices) == 1
    found = unpack(weight.kinds[0], weight.first[numbers]).to(dtype) if is_one else weight.unpack(dtype)[numbers]
    return found if scale == 1.0 else found * scale


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number that starts at byte `at` of each block, [..., 1] in fp16."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(codes: Tensor) -> Tensor:
    """Return the low four bits of [..., n] bytes, then the high four bits, as [..., 2 * n]."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 2:]).to(torch.int8) - 8


def _q5_0(blocks: Tensor) -> Tensor:
    return _fifth_bits(blocks, 2).to(torch.int8) - 16


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return codes of five bits: from byte `at` on, four bytes of high bits, then sixteen of low bits."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return _nibbles(blocks[..., at + 4 :]) | bits.flatten(-2) << 4


def _scaled(blocks: Tensor, integers: Callable[[Tensor], Tensor]) -> Tensor:
    return _half(blocks, 0).float() * integers(blocks)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0).float() * _nibbles(blocks[..., 4:]) + _half(blocks, 2).float()


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0).float() * _fifth_bits(blocks, 4) + _half(blocks, 2).float()


def _q4_k(blocks: Tensor) -> Tensor:
    """Decode Q4_K: eight groups of 32 values. Two groups share 32 bytes."""
    return _with_minima(blocks, _nibbles(torch.unflatten(blocks[..., 16:], -1, (4, 32))))


def _q5_k(blocks: Tensor) -> Tensor:
    """Decode Q5_K: Q4_K and 32 bytes of fifth bits, of which byte i has those of value i of all groups."""
    low = torch.unflatten(_nibbles(torch.unflatten(blocks[..., 48:], -1, (4, 32))).flatten(-2), -1, (8, 32))
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    return _with_minima(blocks, low | high << 4)


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Scale the codes of eight groups and subtract their minima.

    Scales and minima have six bits each, packed in twelve bytes. For the first four groups they are the lower six bits of bytes 0 to 7. For the last
    four groups their lower four bits are in bytes 8 to 11, and their upper two bits are the upper bits of bytes 0 to 7.
    """
    packed = torch.unflatten(blocks[..., 4:16], -1, (3, 4))
    scales, minima, others = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = torch.cat((scales & 63, others & 15 | scales >> 6 << 4), dim=-1)
    minima = torch.cat((minima & 63, others >> 4 | minima >> 6 << 4), dim=-1)
    codes = torch.unflatten(codes.flatten(-2), -1, (8, 32))
    values = (_half(blocks, 0).float() * scales)[..., None] * codes - (_half(blocks, 2).float() * minima)[..., None]
    return values.flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    """Decode Q6_K: two halves of 128 values, with a scale for every 16 values.

    A half has 64 bytes with the lower four bits and 32 bytes with the upper two bits.
    """
    low = _nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64)))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)) >> places & 3
    codes = (low | high.flatten(-2) << 4).to(torch.int8) - 32
    scales = _half(blocks, 208).float() * blocks[..., 192:208].view(torch.int8)
    return (torch.unflatten(codes.flatten(-2), -1, (16, 16)) * scales[..., None]).flatten(-2)


def _iq4_nl(blocks: Tensor) -> Tensor:
    """Decode IQ4_NL: codes are indices of a table that is finer near zero."""
    table = torch.tensor(_IQ4_NL, dtype=torch.int8, device=blocks.device)
    return table[_nibbles(blocks[..., 2:]).long()]


def _mxfp4(blocks: Tensor) -> Tensor:
    """Decode MXFP4: codes are indices of a table of doubled values; the scale is a power of two.

    Its exponent is stored as in fp32.
    """
    table = torch.tensor(_MXFP4, dtype=torch.float32, device=blocks.device)
    scales = torch.exp2(blocks[..., :1].double() - 128).float()  # half of the power, because values are doubled
    return table[_nibbles(blocks[..., 1:]).long()] * scales


def _q3_k(blocks: Tensor) -> Tensor:
    """Decode Q3_K: sixteen groups of 16 values.

    The lower two bits of the codes are in 64 bytes, 32 bytes for each 128 columns. The third bits are in 32 bytes: byte i holds the third bits of
    value i in each of eight runs of 32 values. Each group has a scale of six bits, stored plus 32.
    """
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    low = (torch.unflatten(blocks[..., 32:96], -1, (2, 1, 32)) >> places & 3).flatten(-3, -2)
    third = blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    codes = (low | third << 2).to(torch.int8) - 4
    packed = torch.unflatten(blocks[..., 96:108], -1, (3, 4))
    first, second, others = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    parts = (first & 15, second & 15, first >> 4, second >> 4)
    six_bits = torch.cat([part | (others >> 2 * i & 3) << 4 for i, part in enumerate(parts)], dim=-1)
    scales = _half(blocks, 108).float() * (six_bits.to(torch.int8) - 32)
    return (torch.unflatten(codes.flatten(-2), -1, (16, 16)) * scales[..., None]).flatten(-2)


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
INTEGERS = {"q4_0": _q4_0, "q5_0": _q5_0, "q8_0": _q8_0}
_SCALED = INTEGERS | {"iq4_nl": _iq4_nl}
_VALUES = {kind: partial(_scaled, integers=integers) for kind, integers in _SCALED.items()} | {
    "q4_1": _q4_1, "q5_1": _q5_1, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "mxfp4": _mxfp4,
}  # fmt: skip
