"""Matrices as stored in GGUF files (engine/gguf names their tensors): blocks of codes with scales.

For Llama models llama.cpp stores the rows of query and key projections in another order. On CPUs blocks stay packed (kernels/matrices/blocks.py), and
the file is mapped if its rows are in the model's order; on other devices blocks are unpacked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.shard import MatrixPart, require_units
from pilotlight.engine.weights.stored_tensor import AxisRange, ExpectedTensor
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.blocks import BLOCK_KINDS, MOST_JOINED, BlockWeight, row_bytes, unpack
from pilotlight.kernels.matrices.weight import Weight

TURNED = "turned"  # suffix of plain tensors with rows in llama.cpp's order
_ROTATED = (".q_proj", ".k_proj")
# The projection of latent vectors to keys and values, which files have as two tensors: that to keys is transposed, [heads, latent, key].
_SPLIT, _KEYS, _VALUES = ".kv_b_proj", ".k_b_proj", ".v_b_proj"


@dataclass(frozen=True, slots=True)
class GgufFormat(WeightFormat):
    turned_head_dim: int | None  # size of the heads with rows in llama.cpp's order; None if there are no such heads

    def stays_packed(self, device: torch.device) -> bool:
        return device.type == "cpu" and library.takes_codes()

    def lies_as_stored(self) -> bool:
        return True

    def holds(self, index: Index, name: str) -> bool:
        return self._find(index, name) is not None or self._is_split(index, name)

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        if self._is_split(loader, part.name):
            self._fill_split(loader, part, into)
            return
        kind = self._kind(loader, part)
        if kind == TURNED:
            stored = ExpectedTensor.of(f"{part.name}.{TURNED}", (part.rows, part.columns), FLOATS)
            self._fill(loader, part, into, stored, None)
        else:
            self._fill(loader, part, into, _codes(kind, part), partial(unpack, kind))

    def joins(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> bool:
        kinds = {self._kind(loader, part) for part in parts}
        return TURNED not in kinds and (len(kinds) == 1 or (experts == 1 and len(parts) <= MOST_JOINED))

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> Weight:
        kinds = [self._kind(loader, part) for part in parts]
        if experts > 1 or len(parts) > MOST_JOINED:
            blocks = [self._blocks(loader, kinds[0], parts)]
        else:
            blocks = [self._blocks(loader, kind, [part]) for kind, part in zip(kinds, parts, strict=True)]
        return BlockWeight.joined(blocks, kinds[: len(blocks)], parts[0].columns.size)

    def _blocks(self, loader: WeightRequests, kind: str, parts: Sequence[MatrixPart]) -> torch.Tensor:
        """Request parts with the same kind of block as one tensor, [rows, bytes per row]."""
        rows, columns = [part.rows.size for part in parts], parts[0].columns.size
        stored = [_codes(kind, part) for part in parts]  # raises if the columns of a part cut a block
        name = f"{stacked_name([part.name for part in parts])}.blocks"
        into = loader.take(name, (sum(rows), row_bytes(kind, columns)), torch.uint8)
        for part, of, place in zip(parts, stored, torch.split(into, rows), strict=True):
            self._fill(loader, part, place, of, None)
        return into

    def _is_split(self, index: Index, name: str) -> bool:
        keys = name.replace(_SPLIT, _KEYS)
        return keys != name and (f"{keys}.weight" in index or self._find(index, keys) is not None)

    def _fill_split(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        """Request a projection to keys and values: `into` has its rows by head, keys first."""
        names = [part.name.replace(_SPLIT, split) for split in (_KEYS, _VALUES)]
        kinds = [self._find(loader, name) or "weight" for name in names]
        shapes = [_shape(loader, name, kind) for name, kind in zip(names, kinds, strict=True)]
        (heads, latent, key), (_, value, _) = shapes
        together = [part.rows.total, part.columns.total]
        if shapes[1] != (heads, value, latent) or [heads * (key + value), latent] != together:
            raise CheckpointError(
                f"{' and '.join(names)} have shapes {shapes}; config.json makes them {together} together"
            )
        require_units(part.rows, key + value, part.name, "rows of one head")
        own = part.rows.over(key + value)

        def make(into: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
            into[:, :key].copy_(_decoded(kinds[0], keys).transpose(1, 2))
            into[:, key:].copy_(_decoded(kinds[1], values))

        stored = [
            ExpectedTensor.of(
                f"{name}.{kind}", (own, *loader.shape(f"{name}.{kind}")[1:]), FLOATS if kind == "weight" else ("U8",)
            )
            for name, kind in zip(names, kinds, strict=True)
        ]
        loader.fill(torch.unflatten(into, 0, (own.size, key + value)), stored, make)

    def _find(self, index: Index, name: str) -> str | None:
        return next((kind for kind in (TURNED, *BLOCK_KINDS) if f"{name}.{kind}" in index), None)

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
        read: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Request that `read` converts stored rows to rows of `into`.

        `read` is None if no conversion is needed. The rows of heads in llama.cpp's order are put into the model's order.
        """
        head_dim = self.turned_head_dim if part.name.endswith(_ROTATED) else None
        if head_dim is not None:
            require_units(part.rows, head_dim, part.name, "rows of one head")

        def make(into: torch.Tensor, stored: torch.Tensor) -> None:
            values = stored if read is None else read(stored)
            into.copy_(values if head_dim is None else _in_halves(values, head_dim))

        is_as_stored = read is None and head_dim is None
        loader.fill(into, [stored], None if is_as_stored else make, is_row_wise=head_dim is None)


def read_gguf(described: Mapping[str, Any]) -> GgufFormat:
    """Parse the quantization_config that engine/gguf/directory.py writes."""
    head_dim, kinds = described.get("turned_head_dim"), described.get("kinds") or []
    unknown = [kind for kind in kinds if kind not in BLOCK_KINDS]
    if unknown or not (head_dim is None or (isinstance(head_dim, int) and head_dim > 0)):
        raise CheckpointError(f"config.json's quantization_config does not describe a GGUF file: {dict(described)!r}")
    return GgufFormat(head_dim)


def _codes(kind: str, part: MatrixPart) -> ExpectedTensor:
    """Return the stored bytes of the part. Raises CheckpointError if its columns cut a block."""
    block = BLOCK_KINDS[kind]
    if part.columns.total % block.columns:
        raise CheckpointError(
            f"{part.name} has {part.columns.total} columns, which {kind.upper()}, in blocks of {block.columns}, cannot have"
        )
    require_units(part.columns, block.columns, part.name, "columns in one block")
    columns = AxisRange(*(n * block.num_bytes for n in part.columns.over(block.columns)))
    return ExpectedTensor.of(f"{part.name}.{kind}", (part.rows, columns), ("U8",))


def _shape(loader: WeightRequests, name: str, kind: str) -> tuple[int, int, int]:
    """Return the shape of matrices per head, of the type `kind`.

    Raises CheckpointError for other tensors.
    """
    shape = loader.shape(f"{name}.{kind}") if f"{name}.{kind}" in loader else ()
    if len(shape) != 3:
        found = f"has shape {list(shape)}" if shape else "is missing"
        raise CheckpointError(f"tensor {name} {found}; it must have three dimensions: heads, rows and columns")
    columns = shape[2] if kind == "weight" else shape[2] // BLOCK_KINDS[kind].num_bytes * BLOCK_KINDS[kind].columns
    return shape[0], shape[1], columns


def _decoded(kind: str, stored: torch.Tensor) -> torch.Tensor:
    return stored if kind == "weight" else unpack(kind, stored)


def _in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Move the paired rows of each head, which llama.cpp stores next to each other, half a head apart."""
    return torch.unflatten(rows, 0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
