"""Matrices in eight bits with a scale per row or per group of columns, from compressed-tensors.

Codes are stored as bytes, or four to a 32-bit word with 128 added to each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.shard import MatrixPart, require_units
from pilotlight.engine.weights.stored_tensor import ExpectedTensor
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.int8 import BLOCK, Int8Weight, pad_int8

_CODES = 4  # codes per word


@dataclass(frozen=True, slots=True)
class Int8Format(WeightFormat):
    group: int | None  # columns per scale; None for a scale per row
    in_words: bool

    def stays_packed(self, device: torch.device) -> bool:
        return device.type == "cpu" and library.takes_codes()

    def holds(self, index: Index, name: str) -> bool:
        return f"{name}.weight_scale" in index

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        codes, scales = self._stored(part)
        columns, group = self._sizes(part)

        def unpack(into: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor) -> None:
            into.copy_(Int8Weight(self._codes(stored, columns), scales, columns, group).unpack(into.dtype))

        loader.fill(into, [codes, scales], unpack)

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Int8Weight:
        name, rows = stacked_name([part.name for part in parts]), [part.rows.size for part in parts]
        columns, group = self._sizes(parts[0])
        stored = [self._stored(part) for part in parts]
        codes = loader.take(f"{name}.codes", (sum(rows), -(-columns // BLOCK) * BLOCK), torch.int8)
        scale_type = loader.stored_dtype(stored[0][1].name)
        scales = loader.take(f"{name}.scales", (sum(rows), -(-columns // group)), scale_type)

        def repack(into: torch.Tensor, words: torch.Tensor) -> None:
            into.copy_(self._codes(words, columns))

        for of, *into in zip(stored, torch.split(codes, rows), torch.split(scales, rows), strict=True):
            loader.fill(into[0], of[:1], repack)
            loader.fill(into[1], of[1:], None)
        return Int8Weight(codes, scales, columns, group)

    def _codes(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the codes of a run of rows in the kernels' form."""
        if not self.in_words:
            return pad_int8(stored)
        as_bytes = stored.contiguous().view(torch.uint8)[
            :, :columns
        ]  # little-endian, so a word's lowest byte comes first
        return pad_int8((as_bytes ^ 128).view(torch.int8))

    def _sizes(self, part: MatrixPart) -> tuple[int, int]:
        """Return the number of columns, and how many of them share a scale."""
        group = self.group or part.columns.total
        return part.columns.size, min(group, part.columns.size)

    def _stored(self, part: MatrixPart) -> list[ExpectedTensor]:
        name, rows, columns = part
        group = part.group(self.group, BLOCK)
        scales = ExpectedTensor.of(f"{name}.weight_scale", (rows, columns.over(group)), FLOATS)
        if not self.in_words:
            return [ExpectedTensor.of(f"{name}.weight", (rows, columns), ("I8",)), scales]
        require_units(columns, _CODES, name, "codes in one word")
        return [ExpectedTensor.of(f"{name}.weight_packed", (rows, columns.over(_CODES)), ("I32",)), scales]
