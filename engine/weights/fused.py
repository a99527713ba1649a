"""Division of checkpoint tensors that contain several stacked matrices, to find each by its name.

A matrix is a run of the tensor's bytes, so division reads and copies nothing.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.stored_tensor import StoredTensor

_OF_ALL = ("input_scale", "weight_shape")  # tensors that are valid for all rows
_TURNED = ("qweight", "qzeros", "scales", "g_idx")  # tensors of GPTQ and AWQ, whose rows are the matrix's columns


class FusedRows(NamedTuple):
    """Matrices that are one tensor in the checkpoint."""

    name: str  # the part of the tensor's name after the layer's name
    parts: Mapping[str, int]  # usual name of each matrix -> number of its rows, in order
    # Number of experts if the tensor stacks these rows for each expert, else 0. `{expert}` in the names of parts is replaced by the expert's number.
    experts: int = 0

    def holds(self, name: str, shape: Sequence[int]) -> bool:
        """Return True if the tensor must be divided.

        A stack of transposed matrices is not divided, but transposed when it is read.
        """
        if f".{self.name}." in name:
            return True
        return name.endswith(f".{self.name}") and len(shape) == 3 and shape[1] == sum(self.parts.values())


def divide(tensors: Mapping[str, StoredTensor], fused: tuple[FusedRows, ...]) -> dict[str, StoredTensor]:
    """Return the tensors, with the `fused` ones replaced by their parts.

    Raises CheckpointError if rows cannot be assigned to parts.
    """
    if not fused:
        return dict(tensors)
    divided: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        found = next((each for each in fused if each.holds(name, stored.shape)), None)
        if found is None:
            divided[name] = stored
            continue
        before, _, kind = name.rpartition(found.name)
        kind = kind.removeprefix(".") or "weight"
        for part, tensor in _parts(name, stored, found, kind):
            divided[f"{before}{part}.{kind}"] = tensor
    return divided


def _parts(name: str, stored: StoredTensor, fused: FusedRows, kind: str) -> list[tuple[str, StoredTensor]]:
    if not fused.experts:
        is_renamed = len(fused.parts) == 1 and kind in _TURNED
        if kind in _OF_ALL or is_renamed or prod(stored.shape) == 1:
            return [(part, stored) for part in fused.parts]
        return _runs(name, stored, fused.parts)
    if len(stored.shape) != 3 or stored.shape[0] != fused.experts:
        raise CheckpointError(
            f"tensor {name} in {stored.file.name} has shape {list(stored.shape)}; config.json makes it a stack of {fused.experts} matrices"
        )
    found, size = [], (stored.end - stored.start) // fused.experts
    for i in range(fused.experts):
        start = stored.start + i * size
        one = stored._replace(shape=stored.shape[1:], start=start, end=start + size)
        found += [(part.format(expert=i), tensor) for part, tensor in _runs(name, one, fused.parts)]
    return found


def _runs(name: str, stored: StoredTensor, parts: Mapping[str, int]) -> list[tuple[str, StoredTensor]]:
    """Divide the rows of a tensor among the parts.

    A tensor of scales may have one row for several rows of the matrices.
    """
    total = sum(parts.values())
    num_rows = stored.shape[0] if stored.shape and name.rpartition(".")[2] not in _TURNED else 0
    each = -(-total // num_rows) if num_rows else 0
    if not each or any(rows % each for rows in parts.values()) or num_rows * each != total:
        raise CheckpointError(
            f"tensor {name} in {stored.file.name} has shape {list(stored.shape)}, which is not the {total} rows of {', '.join(parts)}; "
            "a quantized checkpoint is read where each row is packed for itself: export it in such a layout, or take the unquantized one"
        )
    found, start, of_row = [], stored.start, (stored.end - stored.start) // num_rows
    for part, rows in parts.items():
        end = start + rows // each * of_row
        found.append((part, stored._replace(shape=(rows // each, *stored.shape[1:]), start=start, end=end)))
        start = end
    return found
