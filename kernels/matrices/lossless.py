"""Weights of 12 bits that equal bf16 to the bit: a low byte, and an index in a palette of high bytes.

A high byte is the sign and seven bits of the exponent. The values of eight rows have few different high bytes: a palette of 16 covers all but a few
in ten thousand. The other high bytes, the *escapes*, are listed separately. This module knows the layout and its inverse, and is independent of which
weights are worth packing.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import lossless as native
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.activation import gated_native
from pilotlight.kernels.matrices.weight import GatedActivation, Weight, check_gated, check_product, check_rows

GROUP = 128  # columns per group; the last group of a row is padded to 128 columns, or to 64
PALETTE = 16
PALETTE_ROWS = 8
MOST_COLUMNS = 1 << 20
_GROUP_BYTES = GROUP * 3 // 2
_COMPUTED = (torch.bfloat16, torch.float32)  # types in which a value is represented exactly
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LosslessWeight(Weight):
    """A weight in 12 bits. The rows of all experts are stacked; `experts` is 0 for a single matrix."""

    of_rows = ("codes", "palettes", "starts")
    # [rows, row_bytes(columns)] uint8: per group 64 bytes with two palette indices each, and 128 low bytes (_columns has their order). The last
    # group omits the low bytes of its second half if it has no columns there.
    codes: Tensor
    palettes: Tensor  # [ceil(rows / 8), 16] uint8; the first entry is never the high byte of an infinity or NaN
    starts: Tensor  # [ceil(rows / 8) + 1] int32: the first escape of each palette's rows, and the end of all escapes
    escapes: Tensor  # int32: row % 8 << 29 | column << 8 | high byte, ordered by row and column
    columns: int
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.codes.shape[0]
        return (self.experts, rows // self.experts, self.columns) if self.experts else (rows, self.columns)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return lossless_linear(x, self, bias)

    def gated(self, x: Tensor, bias: Tensor | None, activation: GatedActivation) -> Tensor:
        return lossless_gated_linear(x, self, bias, activation)

    def logits(self, hidden: Tensor) -> Tensor:
        return lossless_logits(hidden, self)

    def rows(self, numbers: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return lossless_rows(numbers, self, dtype, scale)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return unpack_lossless(self.codes, self, dtype)

    def by_expert(self, experts: int) -> "LosslessWeight":
        return replace(self, experts=experts)

    def expert(self, i: int) -> "LosslessWeight":
        size = self.codes.shape[0] // self.experts
        assert size % PALETTE_ROWS == 0, "rows of two experts must not share a palette"
        begin, end = i * size, (i + 1) * size
        return LosslessWeight(
            self.codes[begin:end],
            self.palettes[begin // PALETTE_ROWS : end // PALETTE_ROWS],
            self.starts[begin // PALETTE_ROWS : end // PALETTE_ROWS + 1],
            self.escapes,
            self.columns,
        )

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        rows, words = self.codes.shape[0], shape.split()
        check.require(
            "x", dtype in _COMPUTED, f"has dtype {str(dtype).removeprefix('torch.')}, wanted bfloat16 or float32"
        )
        check.agree(f"{name}.columns", words[-1], self.columns)
        check.derive(f"{name}.bytes", row_bytes(self.columns), f"{name}.columns")
        check.derive(f"{name}.palettes", num_palettes(rows), f"{name}.codes")
        check.derive(f"{name}.bounds", num_palettes(rows) + 1, f"{name}.codes")
        check.tensor(
            f"{name}.codes", self.codes, f"{words[0] if len(words) == 2 else '_'} {name}.bytes", (torch.uint8,), dense=2
        )
        check.tensor(f"{name}.palettes", self.palettes, f"{name}.palettes {PALETTE}", (torch.uint8,), dense=2)
        check.tensor(f"{name}.starts", self.starts, f"{name}.bounds", (torch.int32,), dense=1)
        check.tensor(f"{name}.escapes", self.escapes, "_", (torch.int32,), dense=1)


def row_bytes(columns: int) -> int:
    rest = columns % GROUP
    return columns // GROUP * _GROUP_BYTES + (_GROUP_BYTES if rest > GROUP // 2 else GROUP if rest else 0)


def num_palettes(rows: int) -> int:
    return -(-rows // PALETTE_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """The palettes and sizes of a plain weight [rows, columns] in 12 bits."""

    palettes: Tensor
    starts: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, plain: Tensor) -> "Survey":
        palettes, starts = survey_lossless(plain)
        return cls(palettes, starts, *plain.shape)

    @property
    def num_escapes(self) -> int:
        return int(self.starts[-1]) - int(self.starts[0])

    @property
    def num_bytes(self) -> int:
        return self.rows * row_bytes(self.columns) + self.palettes.nbytes + self.starts.nbytes + 4 * self.num_escapes

    def empty(self, on: torch.device | None = None, escapes: Tensor | None = None) -> LosslessWeight:
        """Return a weight to be filled by `encode_lossless`.

        `escapes`: the escapes of the whole weight, if this survey covers only some of its rows.
        """
        codes = self.palettes.new_empty((self.rows, row_bytes(self.columns)), device=on)
        if escapes is None:
            escapes = self.starts.new_zeros(self.num_escapes or 1, device=on)  # an empty tensor has no address
        return LosslessWeight(codes, self.palettes, self.starts, escapes, self.columns)


def pack_lossless(plain: Tensor) -> LosslessWeight:
    """Pack plain [rows, columns] bf16 in 12 bits per value, plus the escapes."""
    weight = Survey.of(plain).empty()
    encode_lossless(plain, weight)
    return weight


def _check_plain(check: ArgumentCheck, plain: Tensor, *_: object) -> None:
    check.tensor("plain", plain, "rows columns", (torch.bfloat16,), dense=2)
    columns = plain.shape[1]
    check.require("plain", 0 < columns <= MOST_COLUMNS, f"has {columns} columns, wanted 1 to {MOST_COLUMNS}")


@operation(_check_plain, native=native.survey)
def survey_lossless(plain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the palettes and starts of plain [rows, columns] bf16."""
    high = (plain.view(torch.int16).int() >> 8) & 255
    rows = plain.shape[0]
    counted = [torch.bincount(part.flatten(), minlength=256) for part in torch.split(high, PALETTE_ROWS)]
    counts = torch.stack(counted) if rows else high.new_empty((0, 256))
    of_numbers = counts.index_fill(1, torch.tensor([0x7F, 0xFF], device=counts.device), -1)
    # as in lossless.c, the first entry is the most frequent high byte that no NaN or infinity has
    ranked = counts.scatter(1, of_numbers.argmax(1, keepdim=True), plain.numel() + 1)
    palettes = ranked.sort(dim=1, descending=True, stable=True).indices[:, :PALETTE]
    starts = F.pad((counts.sum(1) - counts.gather(1, palettes).sum(1)).cumsum(0), (1, 0))
    return palettes.to(torch.uint8), starts.to(torch.int32)


@operation(_check_plain, native=native.encode)
def encode_lossless(plain: Tensor, into: LosslessWeight) -> bool:
    """Fill codes and escapes of a weight whose palettes and starts are set."""
    rows = plain.shape[0]
    bits = F.pad(plain.view(torch.int16).int() & 0xFFFF, (0, -plain.shape[1] % GROUP))
    high, low = bits >> 8, bits & 255
    palettes = into.palettes.long().repeat_interleave(PALETTE_ROWS, 0)[:rows]
    place_of = torch.full((rows, 256), PALETTE, dtype=torch.int64, device=plain.device)
    for place in reversed(range(PALETTE)):
        place_of.scatter_(1, palettes[:, place : place + 1], place)
    places = place_of.gather(1, high.long())
    places[:, plain.shape[1] :] = 0
    is_escape = places == PALETTE
    found = is_escape.nonzero()
    begin = int(into.starts[0])
    entries = found[:, 0] % PALETTE_ROWS << 29 | found[:, 1] << 8 | high[is_escape]
    into.escapes[begin : begin + len(found)].copy_(entries.to(torch.int32))
    order = _columns().to(plain.device)
    arranged = torch.where(places == PALETTE, 0, places).view(rows, -1, GROUP)[..., order]
    pairs = arranged[..., : GROUP // 2] | arranged[..., GROUP // 2 :] << 4
    groups = torch.cat((pairs, low.view(rows, -1, GROUP)[..., order]), dim=-1)
    into.codes.copy_(groups.flatten(1)[:, : into.codes.shape[1]])
    return True


def _check_unpacked(check: ArgumentCheck, codes: Tensor, weight: LosslessWeight, dtype: torch.dtype) -> None:
    weight.require(check, "weight", "rows columns", dtype)


@operation(_check_unpacked, triton="matrices.lossless", native=native.unpack)
def unpack_lossless(codes: Tensor, weight: LosslessWeight, dtype: torch.dtype) -> Tensor:
    """Return the plain weight [..., rows, columns].

    `codes` must be weight.codes: its device selects the form.
    """
    every_row = torch.arange(codes.shape[0], device=codes.device)
    parts = [_decode(weight, numbers) for numbers in torch.split(every_row, _ROWS_AT_A_TIME)]
    return torch.cat([*parts, parts[0][:0]] if parts else []).view(weight.shape).to(dtype)


@operation(check_rows, triton="matrices.lossless", native=native.rows)
def lossless_rows(numbers: Tensor, weight: LosslessWeight, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return the rows `numbers` [n], times `scale`, as [n, columns]."""
    found = _decode(weight, numbers).to(dtype)
    return found if scale == 1.0 else found * scale


@operation(check_product, triton="matrices.lossless", native=native.linear)
def lossless_linear(x: Tensor, weight: LosslessWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [tokens, columns] by the weight; return [tokens, rows]."""
    return F.linear(x, weight.unpack(x.dtype), bias)


@operation(check_gated, triton="matrices.lossless", native=gated_native(native.linear))
def lossless_gated_linear(
    x: Tensor, weight: LosslessWeight, bias: Tensor | None, activation: GatedActivation
) -> Tensor:
    """Return the activation [tokens, intermediate] of x [tokens, columns] times the weight.

    weight [2 * intermediate, columns]: gate rows, then up rows.
    """
    return activation(F.linear(x, weight.unpack(x.dtype), bias))


@operation(check_product, triton="matrices.lossless", native=partial(native.linear, wide_output=True))
def lossless_logits(hidden: Tensor, weight: LosslessWeight) -> Tensor:
    """Return fp32 logits [rows, vocab].

    hidden [rows, columns], weight [vocab, columns].
    """
    return F.linear(hidden, weight.unpack(hidden.dtype)).float()


def _columns() -> Tensor:
    """Return [128]: for each low byte of a group in storage order, its column.

    Of each 16 bytes eight belong to one run of 32 columns and eight to the next. So a CPU joins bytes to values without moving any between 16-byte
    lanes (kernels/cpu/lossless.h).
    """
    place = torch.arange(GROUP)
    return place // 64 * 64 + place % 16 // 8 * 32 + place % 64 // 16 * 8 + place % 8


def _decode(weight: LosslessWeight, numbers: Tensor) -> Tensor:
    """Return the rows `numbers` as bf16 [n, columns]."""
    codes = weight.codes[numbers]
    groups = F.pad(codes, (0, -codes.shape[1] % _GROUP_BYTES)).view(len(numbers), -1, _GROUP_BYTES)
    pairs, low = groups[..., : GROUP // 2], groups[..., GROUP // 2 :]
    places = torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1).long()
    high = weight.palettes[numbers // PALETTE_ROWS].gather(1, places).view_as(low)
    decoded = torch.empty_like(low, dtype=torch.int32)
    decoded[..., _columns().to(low.device)] = high.int() << 8 | low.int()
    bits = decoded.flatten(1)
    group = numbers // PALETTE_ROWS
    counts = weight.starts[group + 1] - weight.starts[group]
    row = torch.arange(len(numbers), device=numbers.device).repeat_interleave(counts)
    within = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    escapes = weight.escapes[weight.starts[group].long()[row] + within]
    # The escapes of all rows of a palette are stored together.
    is_its = escapes >> 29 & 7 == numbers[row] % PALETTE_ROWS
    row, escapes = row[is_its], escapes[is_its]
    column = (escapes >> 8 & (1 << 21) - 1).long()
    bits[row, column] = (escapes & 255) << 8 | bits[row, column] & 255
    return (bits << 16 >> 16).to(torch.int16).view(torch.bfloat16)[:, : weight.columns]
