"""Splitting a context among programs, and joining their results (Flash-Decoding, Dao et al., 2023).

A partial result is an unnormalised sum of values, with its top score and the sum of its weights. Scores are exponents of two. A line is one query of
one head. This module is independent of where keys are stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.attention.paged_tiles import LOG2_E
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import num_processors

_LEAST_SPLIT = 256  # fewest keys of a split; with fewer, a program ends before it has amortised its start
_LEAST = tl.constexpr(_LEAST_SPLIT)
# Number of programs per processor if each of them has _LONG_SPLIT keys. Two to four run at once, so the last round, in which some processors are
# idle, is at most a quarter of the whole. A partial result costs at most 2 / 512 of the memory traffic of a split of 512 keys.
_ROUNDS, _LONG_SPLIT = 8, 512
# The cost of a partial result, in keys, for a program that occupies a whole processor with sums of 64 rows. On an H100, 128 heads of 512
# take 339 us over 64 unsplit contexts of 8,192, 364 in halves, 398 in quarters and 475 in ninths; over contexts of 128 to 8,192 they take 330,
# 293, 272 and, in eighths, 301.
_PART = 350


class Splits(NamedTuple):
    number: int
    parts: torch.Tensor  # [lines, number, columns] fp32; with one split, the final result
    tops: torch.Tensor  # [lines, number] fp32
    sums: torch.Tensor


def split(out: torch.Tensor, programs: int, keys: int, is_alone: bool = False) -> Splits:
    """Choose the number of splits, and allocate their buffers of partial results.

    `out` [..., columns], contiguous, has a row per line; `programs`: the number of programs without a split; `keys`: the most keys that one of them
    reads; `is_alone`: a processor runs one program at a time.
    """
    number = num_splits(programs, keys, out.device, is_alone)
    if number == 1:
        return Splits(1, out, out, out)
    columns = out.shape[-1]
    lines = out.numel() // columns
    parts = torch.empty((lines, number, columns), dtype=torch.float32, device=out.device)
    notes = torch.empty((2, lines, number), dtype=torch.float32, device=out.device)
    return Splits(number, parts, notes[0], notes[1])


def num_splits(programs: int, keys: int, device: torch.device, is_alone: bool = False) -> int:
    processors = num_processors(device)
    if is_alone:  # two rounds, since contexts differ in length, and a few more splits if they fill the last round
        most = max(1, triton.cdiv(keys, _LEAST_SPLIT))
        least = min(most, max(1, round(2 * processors / programs)))
        choices = range(least, min(most, least + 3) + 1)
        return min(choices, key=lambda number: triton.cdiv(programs * number, processors) * (keys / number + _PART))
    rounds = min(triton.cdiv(_ROUNDS * processors, programs), triton.cdiv(keys, _LONG_SPLIT))
    filled = min(triton.cdiv(2 * processors, programs), triton.cdiv(keys, _LEAST_SPLIT))
    return max(1, rounds, filled)


@jit
def keys_of(split, splits, first, end, TILE: tl.constexpr):
    """Return the bounds of the keys in one of `splits` parts of those from `first` to `end`.

    Each sequence divides its own keys evenly, and uses fewer splits if they would be short: the number of splits of a recorded step is fixed by its
    longest possible context.
    """
    used = tl.maximum(1, tl.minimum(splits, tl.cdiv(end - first, _LEAST)))
    length = tl.cdiv(tl.cdiv(end - first, used), TILE) * TILE
    begin = first + split * length
    return begin, tl.minimum(begin + length, end)


@jit
def write_part(
    out, tops, sums, sinks, line, head, is_row, top, total, result, factor, split, splits, column,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, HAS_SINKS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store the partial result of one split or, with DIRECT, the final result.

    `line`, `head` [ROWS]: the line and the head of each row. Stored is `result` [ROWS, DIM] times `factor`; `column`: the numbers 0 to DIM - 1.
    """
    inside = is_row[:, None]
    if COLUMNS < DIM:
        inside = inside & (column < COLUMNS)[None, :]
    target = out + (line * splits + split)[:, None] * COLUMNS + column[None, :]
    if DIRECT:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E - top)
        total = tl.where(is_row & (total > 0.0), total, 1.0)
        tl.store(target, (result * (factor / total)[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        # the part of a split without keys is never read
        tl.store(target, result * factor, mask=inside & (total > 0.0)[:, None])
        tl.store(tops + line * splits + split, top, mask=is_row)
        tl.store(sums + line * splits + split, total, mask=is_row)


@jit(of_batch=("splits",))  # the number of splits depends on lengths
def _join(
    parts, tops, sums, sinks, out, splits, heads,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    column, i = tl.arange(0, DIM), tl.arange(0, CHUNK)
    top, total = float("-inf"), 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks + line % heads).to(tl.float32) * LOG2_E, 1.0
    result = tl.zeros([DIM], tl.float32)
    for first in range(0, splits, CHUNK):
        is_split = first + i < splits
        its_sum = tl.load(sums + line * splits + first + i, mask=is_split, other=0.0)
        has_seen = its_sum > 0.0
        its_top = tl.load(tops + line * splits + first + i, mask=has_seen, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(its_top, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, fade = tl.exp2(its_top - shift), tl.exp2(top - shift)
        place = (line * splits + first + i)[:, None] * COLUMNS + column[None, :]
        part = tl.load(parts + place, mask=has_seen[:, None] & (column < COLUMNS)[None, :], other=0.0)
        result = result * fade + tl.sum(part * weight[:, None], axis=0)
        total = total * fade + tl.sum(its_sum * weight, axis=0)
        top = new_top
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(out + line * COLUMNS + column, (result / total).to(out.dtype.element_ty), mask=column < COLUMNS)


def join(splits: Splits, sinks: torch.Tensor | None, heads: int, out: torch.Tensor) -> None:
    """Join the partial results into `out`. A token's lines are its heads, in order."""
    if splits.number > 1:
        columns = out.shape[-1]
        _join[(out.numel() // columns,)](
            splits.parts, splits.tops, splits.sums, out if sinks is None else sinks, out, splits.number, heads,
            COLUMNS=columns, DIM=triton.next_power_of_2(columns), CHUNK=16, HAS_SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip
