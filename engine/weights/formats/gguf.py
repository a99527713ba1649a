"""Matrices as GGUF files keep them (engine/gguf names their tensors): blocks of codes under scales of their own, and queries' and keys' rows as
llama.cpp orders them for Llama's.

What is in a block, by ggml's ggml-common.h and the reference forms in ggml-quants.c (https://github.com/ggml-org/ggml). Codes that are times one
scale for 32 columns stay packed on CPUs, in the layouts of kernels/matrices/int4.py and int8.py; all others are unpacked.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.kinds import KINDS, PACKED_BITS
from pilotlight.engine.weights.checkpoint import ExpectedTensor
from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.shard import AxisRange, MatrixPart
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.int8 import Int8Weight
from pilotlight.kernels.matrices.weight import Weight

log = logging.getLogger(__name__)

TURNED = "turned"  # plain numbers in llama.cpp's order of rows
_GROUP = 32  # columns under one scale, of what stays packed
_OF_NAMES = {kind.name.lower(): kind for kind in KINDS.values() if kind.plain is None}
_ROTATED = (".q_proj", ".k_proj")


@dataclass(frozen=True, slots=True)
class GgufFormat(WeightFormat):
    is_packed: bool  # most codes can stay as they are
    turned_head_dim: int | None  # of the heads whose rows are neighbours; None: none are

    def stays_packed(self, device: torch.device) -> bool:
        return self.is_packed and device.type == "cpu" and library.takes_codes()

    def holds(self, index: Index, name: str) -> bool:
        return self._find(index, name) is not None

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        kind = self._kind(loader, part)
        if kind == TURNED:
            stored = ExpectedTensor.of(f"{part.name}.{TURNED}", (part.rows, part.columns), FLOATS)
            self._fill(loader, part, into, stored, lambda plain: plain)
        else:
            self._fill(loader, part, into, _codes(kind, part), partial(unpack, kind))

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        return all([self._kind(loader, part) in PACKED_BITS for part in parts])

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Weight:
        kinds = [self._kind(loader, part) for part in parts]
        name = stacked_name([part.name for part in parts])
        rows, columns = [part.rows.size for part in parts], parts[0].columns.size
        is_int4 = set(kinds) == {"q4_0"}
        width, dtype = (columns // 2, torch.uint8) if is_int4 else (columns, torch.int8)
        codes = loader.take(f"{name}.codes", (sum(rows), width), dtype)
        scales = loader.take(f"{name}.scales", (sum(rows), columns // _GROUP), torch.float16)
        for kind, part, *into in zip(kinds, parts, torch.split(codes, rows), torch.split(scales, rows), strict=True):
            stored = _codes(kind, part)
            self._fill(loader, part, into[0], stored, partial(_packed, kind, is_int4))
            self._fill(loader, part, into[1], stored, partial(_scales, kind))
        if is_int4:
            return Int4Weight(codes, scales, None, columns, _GROUP)
        return Int8Weight(codes, scales, columns, _GROUP)

    def _find(self, index: Index, name: str) -> str | None:
        return next((kind for kind in (TURNED, *_OF_NAMES) if f"{name}.{kind}" in index), None)

    def _kind(self, loader: WeightRequests, part: MatrixPart) -> str:
        found = self._find(loader, part.name)
        assert found is not None, part.name
        return found

    def _fill(
        self,
        loader: WeightRequests,
        part: MatrixPart,
        into: torch.Tensor,
        stored: ExpectedTensor,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Note that `read` makes rows of `into` of the same rows of what is stored; then their order is undone, where llama.cpp changed it."""
        head_dim = self.turned_head_dim if part.name.endswith(_ROTATED) else None
        if head_dim is not None:
            part.rows.require_units(head_dim, part.name, "rows of one head")

        def make(into: torch.Tensor, stored: torch.Tensor) -> None:
            values = read(stored)
            into.copy_(values if head_dim is None else _in_halves(values, head_dim))

        loader.fill(into, [stored], make, is_row_wise=head_dim is None)


def read_gguf(described: Mapping[str, Any]) -> GgufFormat:
    """Read what engine/gguf/directory.py wrote."""
    bits, head_dim = described.get("bits"), described.get("turned_head_dim")
    if bits not in (None, 4, 8) or not (head_dim is None or (isinstance(head_dim, int) and head_dim > 0)):
        raise CheckpointError(f"config.json's quantization_config is none of a GGUF file: {dict(described)!r}")
    format, kinds = GgufFormat(bits is not None, head_dim), described.get("kinds") or []
    unpacked = kinds if not format.is_packed else [kind for kind in kinds if kind not in PACKED_BITS]
    if unpacked:
        log.info("codes of the types %s are unpacked: no product reads them as they are", ", ".join(map(str, unpacked)))
    return format


def unpack(kind: str, stored: torch.Tensor) -> torch.Tensor:
    """Rows of bytes [rows, blocks * bytes] -> fp32 [rows, columns]"""
    return _VALUES[kind](_blocks(kind, stored)).flatten(1)


def _codes(kind: str, part: MatrixPart) -> ExpectedTensor:
    """Return the run of bytes that holds the part."""
    of = _OF_NAMES[kind]
    if part.columns.total % of.block:
        raise CheckpointError(
            f"{part.name} has {part.columns.total} columns, which {of.name}, in blocks of {of.block}, cannot have"
        )
    part.columns.require_units(of.block, part.name, "columns in one block")
    columns = AxisRange(*(n * of.block_bytes for n in part.columns.over(of.block)))
    return ExpectedTensor.of(f"{part.name}.{kind}", (part.rows, columns), ("U8",))


def _in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's order of a head's rows, in which those that turn together are neighbours: here they are half a head apart."""
    return torch.unflatten(rows, 0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _packed(kind: str, is_int4: bool, stored: torch.Tensor) -> torch.Tensor:
    """Return codes as kernels/matrices/int4.py wants them, which is how Q4_0's lie, or as kernels/matrices/int8.py does."""
    blocks = _blocks(kind, stored)
    return (blocks[..., 2:] if is_int4 else _INTEGERS[kind](blocks)).flatten(1)


def _scales(kind: str, stored: torch.Tensor) -> torch.Tensor:
    return _half(_blocks(kind, stored), 0).flatten(1)


def _blocks(kind: str, stored: torch.Tensor) -> torch.Tensor:
    return torch.unflatten(stored, 1, (-1, _OF_NAMES[kind].block_bytes))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at a byte of each block, [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 * n]: the lower four bits of all, then the higher."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 2:]).to(torch.int8) - 8


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _fifth_bits(blocks, 2).to(torch.int8) - 16


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return codes of five bits: at a byte four bytes of their highest bits, then sixteen of the others."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return _nibbles(blocks[..., at + 4 :]) | bits.flatten(-2) << 4


def _scaled(blocks: torch.Tensor, integers: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return _half(blocks, 0).float() * integers(blocks)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0).float() * _nibbles(blocks[..., 4:]) + _half(blocks, 2).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0).float() * _fifth_bits(blocks, 4) + _half(blocks, 2).float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32; two share 32 bytes."""
    return _with_minima(blocks, _nibbles(torch.unflatten(blocks[..., 16:], -1, (4, 32))))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with a fifth bit for each code: byte i of 32 has those of value i of all eight groups."""
    low = torch.unflatten(_nibbles(torch.unflatten(blocks[..., 48:], -1, (4, 32))).flatten(-2), -1, (8, 32))
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    return _with_minima(blocks, low | high << 4)


def _with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scale the codes of eight groups; of each the scale and what is taken off have six bits, in twelve bytes: of the first four groups a byte's
    lower six, of the others four of a byte of their own and the upper two of the first ones'."""
    packed = torch.unflatten(blocks[..., 4:16], -1, (3, 4))
    scales, minima, others = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = torch.cat((scales & 63, others & 15 | scales >> 6 << 4), dim=-1)
    minima = torch.cat((minima & 63, others >> 4 | minima >> 6 << 4), dim=-1)
    codes = torch.unflatten(codes.flatten(-2), -1, (8, 32))
    values = (_half(blocks, 0).float() * scales)[..., None] * codes - (_half(blocks, 2).float() * minima)[..., None]
    return values.flatten(-2)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Two halves of 128; in each 64 bytes of four bits and 32 of the upper two, and a scale for every 16 values."""
    low = _nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64)))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)) >> places & 3
    codes = (low | high.flatten(-2) << 4).to(torch.int8) - 32
    scales = _half(blocks, 208).float() * blocks[..., 192:208].view(torch.int8)
    return (torch.unflatten(codes.flatten(-2), -1, (16, 16)) * scales[..., None]).flatten(-2)


_INTEGERS = {"q4_0": _q4_0, "q5_0": _q5_0, "q8_0": _q8_0}
_VALUES = {kind: partial(_scaled, integers=integers) for kind, integers in _INTEGERS.items()} | {
    "q4_1": _q4_1, "q5_1": _q5_1, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
