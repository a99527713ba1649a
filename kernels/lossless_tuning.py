"""Which products of a few rows are faster on this device with weights in 12 bits than with plain ones, and by which tiles.

Measured as in tuning.py, into a table of its own: sizes that it lacks are no faster. Knows weights in 12 bits; refuses to know where the table lies.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from kernels.linear import linear
from kernels.lossless import PALETTE, LosslessWeight, num_palettes, pack_lossless, row_bytes
from kernels.tuning import (
    MOST_LOSSLESS_TOKENS,
    Clock,
    Sizes,
    SplitKTile,
    TiledProduct,
    TunedProduct,
    copies_of_weight,
    cuda_seconds,
    prepare,
)
from kernels.warm_up import fake_tensor


def tune(
    shapes: Iterable[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock | None = None,
    until: float = math.inf,
) -> Iterator[TunedProduct]:
    """Measure the same with weights in 12 bits, beside the fastest product with the plain one that is known here."""
    wanted = list(shapes)
    prepare(device, lambda: _run_all(wanted, dtype))
    for rows, columns in wanted:
        weights = copies_of_weight(rows, columns, device, dtype)
        packed = pack_lossless(weights[0].to(torch.bfloat16).cpu())
        coded = [_copy(packed, device) for _ in weights]
        product = TiledProduct(coded[0].unpack(dtype), coded, run, candidates, weights, linear)
        yield from product.measure(MOST_LOSSLESS_TOKENS, clock or cuda_seconds, until)


def candidates(sizes: Sizes) -> list[SplitKTile]:
    """Return the tiles to try with a weight in 12 bits: one token without tensor cores, and all with them, 16 rows, some empty."""
    found = []
    for splits in (1, 2, 4, 8):
        for half in (64, 128, 256):
            if sizes.columns < 2 * half * splits and (half, splits) != (64, 1):
                continue
            if sizes.tokens == 1:
                found += [SplitKTile(1, rows, half, 4, splits) for rows in (8, 16, 32)]
            if half <= 128:
                found += [SplitKTile(16, rows, half, 4, splits) for rows in (32, 64)]
    return found


def run(chosen: SplitKTile, x: torch.Tensor, weight: LosslessWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    from kernels.triton import lossless as form  # a choice is made where it can be imported

    return form.product(x, weight, bias, form.tile_of(chosen), chosen.splits)


def _run_all(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> None:
    """Launch every candidate, for a trace."""
    for rows, columns in shapes:
        weight = LosslessWeight(
            fake_tensor((rows, row_bytes(columns)), torch.uint8),
            fake_tensor((num_palettes(rows), PALETTE), torch.uint8),
            fake_tensor((num_palettes(rows) + 1,), torch.int32),
            fake_tensor((1,), torch.int32),
            columns,
        )
        for tokens in (1, 2, 4, 8, 16):
            for candidate in candidates(Sizes(tokens, rows, columns)):
                run(candidate, fake_tensor((tokens, columns), dtype), weight)


def _copy(weight: LosslessWeight, device: torch.device) -> LosslessWeight:
    """Another one of the same bytes, on the device."""
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    moved: dict[str, Any] = {name: part.to(device, copy=True) for name, part in parts.items() if torch.is_tensor(part)}
    return replace(weight, **moved)
