"""Low-rank adapters beside a product: one launch for A x in fp32, one per fused part for B.

With few tokens a program computes a single one, else a tile of tokens, whose adapters it takes one after the other. A tile usually belongs to one
prompt and so has one adapter.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch

_RANK, _COLUMNS = tl.constexpr(64), tl.constexpr(64)  # MOST_RANK and COLUMNS of kernels/lora.py
_DEPTH = 128
_FEW, _TILE = 64, 16  # up to _FEW tokens are computed in separate programs; more tokens, in tiles of _TILE


@jit(of_batch=("slots", "tokens"))
def _shrink(
    x, adapters, places, slots, sums, tokens, x_token, slot_stride, columns, PARTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    part, row = tl.program_id(1), tl.arange(0, _RANK)
    if TOKENS == 1:
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        if slot >= 0:
            place = places + slot * slot_stride + part * 3
            begin, rank = tl.load(place), tl.load(place + 2)
            total = tl.zeros([_RANK], tl.float32)
            for k in range(0, columns, DEPTH):
                column = k + tl.arange(0, DEPTH)
                inside = column < columns
                value = tl.load(x + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
                both = (row < rank)[:, None] & inside[None, :]
                a = tl.load(adapters + begin + row[:, None] * columns + column[None, :], mask=both, other=0.0)
                total += tl.sum(a.to(tl.float32) * value[None, :], axis=1)
            tl.store(sums + (token * PARTS + part) * _RANK + row, total)
    else:
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        left = tl.load(slots + token, mask=token < tokens, other=-1)
        slot = tl.max(left, axis=0)
        while slot >= 0:
            is_its = left == slot
            place = places + slot * slot_stride + part * 3
            begin, rank = tl.load(place), tl.load(place + 2)
            total = tl.zeros([TOKENS, _RANK], tl.float32)
            for k in range(0, columns, DEPTH):
                column = k + tl.arange(0, DEPTH)
                inside = column < columns
                value = tl.load(
                    x + token[:, None] * x_token + column[None, :], mask=is_its[:, None] & inside[None, :], other=0.0
                )
                both = (row < rank)[:, None] & inside[None, :]
                a = tl.load(adapters + begin + row[:, None] * columns + column[None, :], mask=both, other=0.0)
                total += tl.dot(value, tl.trans(a), input_precision="ieee")
            tl.store(sums + (token[:, None] * PARTS + part) * _RANK + row[None, :], total, mask=is_its[:, None])
            left = tl.where(is_its, -1, left)
            slot = tl.max(left, axis=0)


@jit(of_batch=("slots", "tokens"))
def _expand(
    y, adapters, places, slots, sums, tokens, outputs, slot_stride, size, PART: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    row, block = tl.arange(0, _RANK), tl.program_id(1)
    column = tl.arange(0, _COLUMNS)
    inside = block * _COLUMNS + column < size
    if TOKENS == 1:
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        if slot >= 0:
            place = places + slot * slot_stride + PART * 3
            begin, rank = tl.load(place + 1), tl.load(place + 2)
            u = tl.load(sums + (token * PARTS + PART) * _RANK + row, mask=row < rank, other=0.0)
            at = begin + block.to(tl.int64) * rank * _COLUMNS
            b = tl.load(
                adapters + at + row[:, None] * _COLUMNS + column[None, :], mask=(row < rank)[:, None], other=0.0
            )
            target = y + token * outputs + block * _COLUMNS + column
            before = tl.load(target, mask=inside, other=0.0)
            added = tl.sum(u[:, None] * b.to(tl.float32), axis=0)
            tl.store(target, (before.to(tl.float32) + added).to(before.dtype), mask=inside)
    else:
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        left = tl.load(slots + token, mask=token < tokens, other=-1)
        slot = tl.max(left, axis=0)
        while slot >= 0:
            is_its = left == slot
            place = places + slot * slot_stride + PART * 3
            begin, rank = tl.load(place + 1), tl.load(place + 2)
            u = tl.load(
                sums + (token[:, None] * PARTS + PART) * _RANK + row[None, :],
                mask=is_its[:, None] & (row < rank)[None, :],
                other=0.0,
            )
            at = begin + block.to(tl.int64) * rank * _COLUMNS
            b = tl.load(
                adapters + at + row[:, None] * _COLUMNS + column[None, :], mask=(row < rank)[:, None], other=0.0
            )
            target, both = (
                y + token[:, None] * outputs + block * _COLUMNS + column[None, :],
                is_its[:, None] & inside[None, :],
            )
            before = tl.load(target, mask=both, other=0.0)
            added = tl.dot(u, b.to(tl.float32), input_precision="ieee")
            tl.store(target, (before.to(tl.float32) + added).to(before.dtype), mask=both)
            left = tl.where(is_its, -1, left)
            slot = tl.max(left, axis=0)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    ends: tuple[int, ...],
) -> torch.Tensor:
    """Compute add_lora of kernels/lora.py."""
    tokens, columns = x.shape
    if not tokens:
        return y
    outputs, parts, stride = y.shape[1], len(ends), places.stride(0)
    tile = 1 if tokens <= _FEW else _TILE
    tiles = triton.cdiv(tokens, tile)
    check_launch("add_lora", "y", triton.cdiv(outputs, _COLUMNS.value), f"blocks of {_COLUMNS.value} columns")
    sums = torch.empty((tokens, parts, _RANK.value), dtype=torch.float32, device=x.device)
    _shrink[(tiles, parts)](
        x, adapters, places, slots, sums, tokens, x.stride(0), stride, columns, PARTS=parts, TOKENS=tile, DEPTH=_DEPTH, num_warps=4
    )  # fmt: skip
    for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
        grid = (tiles, triton.cdiv(end - begin, _COLUMNS.value))
        _expand[grid](
            y[:, begin:], adapters, places, slots, sums, tokens, outputs, stride, end - begin, PART=part, PARTS=parts, TOKENS=tile, num_warps=4
        )  # fmt: skip
    return y
