"""The content of a slot: A and B of every projection that an adapter changes, in the model's dtype.

An adapter's rank is padded to a class with zeros, which change no sum; the scale is multiplied into B. If several processes share a model, each has
the rows of B and the columns of A that match its weights. This module knows tensors, and is independent of slots.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pilotlight.engine.adapters.peft import (
    WEIGHTS,
    AdaptedProjection,
    AdapterDescription,
    AdapterError,
    check_shape,
    describe,
    digest_of,
    projection_key,
)
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.engine.weights.shard import MatrixPart, Stage
from pilotlight.kernels.lora import blocked, num_values, padded_rank

_LAYER = re.compile(r"layers\.(\d+)\.")
_ALIGNMENT = 64  # every A and B starts at a multiple of so many values


class SlotContent(NamedTuple):
    rank: int  # the padded rank
    values: torch.Tensor  # [n]
    # [projections, 3] int64: offsets of A and B, and the padded rank; the rank is 0 for a projection that does not change
    places: torch.Tensor


def slot_size(projections: Sequence[MatrixPart], rank: int) -> int:
    """Return the number of values of an adapter that has this padded rank and changes every projection."""
    sizes = (num_values(rank, part.rows.size, part.columns.size) for part in projections)
    return sum(_aligned(size) for pair in sizes for size in pair)


def read_content(
    source: AdapterSource, projections: Sequence[MatrixPart], dtype: torch.dtype, stage: Stage | None = None
) -> SlotContent:
    """Read an adapter for a model's projections, or those of one stage.

    Raises AdapterError for an adapter of another model, or if its files have changed since it was registered.
    """
    from safetensors import SafetensorError  # imported here because a host's start does not need it
    from safetensors.torch import load_file

    directory = Path(source.path)
    description = describe(directory)
    if digest_of(directory) != source.digest:
        raise AdapterError(f"the files of {directory} are not those that were registered: add the adapter again")
    try:
        tensors = load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{directory / WEIGHTS} cannot be read: {error}") from None
    if stage is not None:
        description = of_stage(description, tensors, projections, dtype, stage)
    return make_content(description, tensors, projections, dtype)


def of_stage(
    description: AdapterDescription,
    tensors: Mapping[str, torch.Tensor],
    projections: Sequence[MatrixPart],
    dtype: torch.dtype,
    stage: Stage,
) -> AdapterDescription:
    """Return the part of an adapter that changes a stage's layers. Raises AdapterError.

    The first stage also checks other stages' parts, against its own projections of the same kind: later stages could no longer refuse the adapter.
    """
    own, alike = {}, {_kind_of(projection_key(part.name)): part for part in projections}
    for key, adapted in description.projections.items():
        if _layer_of(key) in stage.layers:
            own[key] = adapted
        elif stage.is_first:
            if (part := alike.get(_kind_of(key))) is None:
                raise AdapterError(
                    f"it changes {key}, which the layers of the first stage do not have: serve the model without stages"
                )
            check_shape(key, adapted, _shape_of(part))
            _halves(adapted, tensors, part, dtype)
    return description._replace(projections=own)


def _layer_of(key: str) -> int:
    found = _LAYER.match(key)
    return int(found[1]) if found is not None else -1


def _kind_of(key: str) -> str:
    return _LAYER.sub("", key)


def _shape_of(part: MatrixPart) -> tuple[int, int]:
    return part.rows.total, part.columns.total


def make_content(
    description: AdapterDescription, tensors: Mapping[str, torch.Tensor], projections: Sequence[MatrixPart], dtype: torch.dtype
) -> SlotContent:  # fmt: skip
    """Return an adapter as the content of a slot. Raises AdapterError."""
    numbers = {projection_key(part.name): number for number, part in enumerate(projections)}
    for key, adapted in description.projections.items():
        check_shape(key, adapted, _shape_of(projections[numbers[key]]) if key in numbers else None)
    sizes = {
        key: num_values(padded_rank(adapted.rank), projections[numbers[key]].rows.size, projections[numbers[key]].columns.size)
        for key, adapted in description.projections.items()
    }  # fmt: skip
    values = torch.zeros(sum(_aligned(size) for pair in sizes.values() for size in pair), dtype=dtype)
    places, at = torch.zeros(len(projections), 3, dtype=torch.int64), 0
    for key, adapted in description.projections.items():
        a, b = _halves(adapted, tensors, projections[numbers[key]], dtype)
        a_size, b_size = sizes[key]
        b_at = at + _aligned(a_size)
        values[at : at + a_size] = a.flatten()
        values[b_at : b_at + b_size] = b.flatten()
        places[numbers[key]] = torch.tensor([at, b_at, a.shape[0]])
        at = b_at + _aligned(b_size)
    return SlotContent(padded_rank(description.rank), values, places)


def _halves(
    adapted: AdaptedProjection, tensors: Mapping[str, torch.Tensor], part: MatrixPart, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's A [padded rank, columns] and B [blocks, padded rank, 64], with the scale in B."""
    whole_a, whole_b = tensors[adapted.a].float(), tensors[adapted.b].float() * adapted.scale
    for name, tensor in ((adapted.a, whole_a), (adapted.b, whole_b)):
        if not bool(torch.isfinite(tensor.to(dtype)).all()):
            raise AdapterError(f"tensor {name} holds NaN or infinity, or would in {str(dtype).removeprefix('torch.')}")
    rank = padded_rank(adapted.rank)
    a = torch.zeros(rank, part.columns.size)
    a[: adapted.rank] = whole_a[:, part.columns.start : part.columns.end]
    b = torch.zeros(part.rows.size, rank)
    b[:, : adapted.rank] = whole_b[part.rows.start : part.rows.end]
    return a.to(dtype), blocked(b.to(dtype))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
