"""Tell whether every block a step is about to read still holds what its sequence put there.

A block's generation rises each time it is handed out anew, or leaves the model with its slab; a sequence remembers the generation of each block in
its table. All are compared before a step reads any: where there are many, in a few operations over all tables together, without Python per block. A
difference means that the bookkeeping was wrong, and ends that sequence alone. Refuses to know how that happens and what a block holds.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.sequence import Sequence


_FEW = 1024  # blocks that Python compares in the time in which it calls torch, whose code a step has driven out of the caches


def stale(generations: "array[int]", sequences: SequenceOf["Sequence"], *, with_torch: bool = True) -> list[int]:
    """Return the places in the list of those sequences that hold a block which is not theirs any more. `generations`: of all blocks, as they are now;
    `with_torch`: it has been imported, or may be."""
    blocks, remembered = array("q"), array("q")
    for sequence in sequences:
        for table in sequence.tables:
            blocks += table.blocks
            remembered += table.generations
    if not blocks:
        return []
    assert len(blocks) == len(remembered), "a block table and its generations differ in length"
    if len(blocks) <= _FEW or not with_torch:
        current = array("q", map(generations.__getitem__, blocks))
        if current == remembered:
            return []
        return _places([a != b for a, b in zip(current, remembered, strict=True)], sequences)
    differs = _tensor(generations)[_tensor(blocks)] != _tensor(remembered)
    return _places(differs.tolist(), sequences) if differs.any() else []


def _tensor(numbers: "array[int]") -> "torch.Tensor":
    import torch  # here: a host is reachable before torch is imported

    return torch.frombuffer(numbers, dtype=torch.int64)


def _places(differs: list[bool], sequences: SequenceOf["Sequence"]) -> list[int]:
    places, start = [], 0
    for i, sequence in enumerate(sequences):
        end = start + sum([len(table) for table in sequence.tables])
        if any(differs[start:end]):
            places.append(i)
        start = end
    return places
