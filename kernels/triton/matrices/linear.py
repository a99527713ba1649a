"""Products of few rows with a plain weight, and of many rows with a weight that is decoded on reading.

kernels/triton/matrices/packed.py has products of a few rows with packed weights. Up to 4 rows of x are multiplied with a plain weight without tensor
cores, up to 16 with any weight by the smallest tile of tensor cores. In both cases the columns are split among enough programs to keep memory busy,
and the parts are added in a fixed order. Compiled code depends only on the shapes of tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pilotlight.kernels.matrices.weight import PLAIN, Operands, plain_operands
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import num_processors
from pilotlight.kernels.triton.matrices.tiles import multiply, multiply_few

FEW = 4  # most rows of x that are multiplied without tensor cores
_LEAST_COLUMNS = 512  # fewest columns of a split
SCRATCH_BYTES = 128 << 20  # size of the memory for decoded rows of a weight
# _NEAR_ROWS rows are decoded at a time for up to _NEAR_TOKENS tokens. With 4096 columns the L2 still holds them when cuBLAS reads them: 64 rows of x
# and INT4 of 28672 x 4096 took 206 us on an H100 in two parts, and 162 in seven. With more tokens so few rows would not fill cuBLAS's tiles: 512 rows
# of x and 4096 x 14336 took 180 us in four parts, and 131 whole.
_NEAR_ROWS, _NEAR_TOKENS = 4096, 512
# Number of tiles of x that take turns at the same rows of the weight, so that both stay in the L2 cache.
_GROUP_TILES = 8


class Tile(NamedTuple):
    """The part of a product that one program computes, and its warps."""

    tokens: int
    rows: int
    half: int  # half of the columns per step
    warps: int
    stages: int


@jit(of_batch=("tokens", "splits"))
def _multiply(
    x, weight, scales, zeros, bias, out,
    x_token, out_token, out_split, tokens, rows, columns, weight_row, scales_row, row_group, column_group, split_columns, splits, group_tiles,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr,
    FEW: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split, program = program % splits, program // splits
    token_tiles, row_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    band = program // (group_tiles * row_tiles)
    in_band = tl.minimum(token_tiles - band * group_tiles, group_tiles)
    within = program - band * group_tiles * row_tiles
    token = (band * group_tiles + within % in_band) * TOKENS + tl.arange(0, TOKENS)
    row = within // in_band * ROWS + tl.arange(0, ROWS)
    is_token, is_row = token < tokens, row < rows
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, columns)
    if FEW:
        sums = multiply_few(
            x, x_token, tokens, weight, row.to(tl.int64), is_row, begin, end, columns, weight_row,
            TOKENS, ROWS, HALF, STAGES,
        )  # fmt: skip
    else:
        sums, _ = multiply(
            x + token.to(tl.int64) * x_token, is_token, weight, scales, zeros, row.to(tl.int64), is_row, 0, begin, end, columns,
            weight_row, scales_row, row_group, column_group, FORMAT, HAS_ZEROS, False, TOKENS, ROWS, HALF,
        )  # fmt: skip
    if HAS_BIAS and DIRECT:
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + split.to(tl.int64) * out_split + token.to(tl.int64)[:, None] * out_token + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@jit(of_batch=("splits",))
def add_parts(parts, bias, out, parts_split, values, rows, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of parts [splits, values], plus the bias of each row, to out [values]."""
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = value < values
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * parts_split + value, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + value % rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + value, total.to(out.dtype.element_ty), mask=inside)


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [a few tokens, columns] by weight [rows, columns], which is read only once."""
    return product(x, plain_operands(weight), bias)


def product(
    x: torch.Tensor,
    stored: Operands,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    splits: int = 0,
) -> torch.Tensor:
    """Return the product [tokens, rows]; `tile` and `splits` override the defaults, for `tune`."""
    assert x.stride(1) == 1, "columns must be contiguous"
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    tokens, columns = x.shape
    rows = stored.rows
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if not columns:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    tile = tile or tile_for(tokens, x.dtype, stored.format == PLAIN)
    programs = triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows)
    splits = splits or (num_splits(programs, columns, x.device) if tokens <= 16 else 1)
    split_columns = triton.cdiv(triton.cdiv(columns, splits), 2 * tile.half) * 2 * tile.half
    splits = triton.cdiv(columns, split_columns)
    parts = out if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    _multiply[(programs * splits,)](
        x, stored.weight, stored.scales, stored.zeros, out if bias is None else bias, parts,
        x.stride(0), rows, 0 if splits == 1 else tokens * rows, tokens, rows, columns, stored.weight_row, stored.scales_row,
        stored.row_group, stored.column_group, split_columns, splits, _GROUP_TILES,
        FORMAT=stored.format, HAS_ZEROS=stored.has_zeros, HAS_BIAS=bias is not None, DIRECT=splits == 1,
        FEW=tile.tokens <= FEW, TOKENS=tile.tokens, ROWS=tile.rows, HALF=tile.half, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        sum_parts(parts, bias, out)
    return out


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Sum parts fp32 [splits, tokens, rows] and bias [rows] into out [tokens, rows], all contiguous."""
    splits, values = parts.shape[0], out.numel()
    add_parts[(triton.cdiv(values, 256),)](
        parts, out if bias is None else bias, out, values, values, out.shape[1], splits,
        HAS_BIAS=bias is not None, BLOCK=256, num_warps=2,
    )  # fmt: skip


def through_memory(
    x: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None,
    decode: Callable[[torch.Tensor, int], None],
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """Multiply x by a weight that `decode` writes to scratch memory, some rows at a time.

    `decode(out, first)` fills `out` with rows of the weight, from number `first` on. `scratch_bytes`: size of that memory.
    """
    tokens, columns = x.shape
    step = min(rows, scratch_bytes // (columns * x.element_size()), _NEAR_ROWS if tokens <= _NEAR_TOKENS else rows)
    if step < rows:
        step = max(8, step // 128 * 128)  # a whole number of cuBLAS's tiles
    scratch = torch.empty((min(step, rows), columns), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    for first in range(0, rows, step):
        some = scratch[: min(step, rows - first)]
        decode(some, first)
        into = out[:, first : first + step]
        if bias is None:
            torch.mm(x, some.t(), out=into)
        else:
            torch.addmm(bias[first : first + step], x, some.t(), out=into)
    return out


def tile_for(tokens: int, dtype: torch.dtype, is_plain: bool) -> Tile:
    """Return one of six tiles, by the number of rows of x. A model needs no other compiled tiles."""
    if tokens <= FEW and is_plain:
        # A step has 512 columns: the asynchronous copy of x, which every row of the weight needs, then moves 4 bytes for each of 128 threads, the
        # minimum.
        return Tile(triton.next_power_of_2(tokens), 16 if tokens == 1 else 8, 256, 4, 4)
    stages = 2 if dtype == torch.float32 else 3
    if tokens <= 16:
        return Tile(16, 32, 64, 4, stages)
    if tokens <= 64:
        return Tile(64, 64, 32, 4, stages)
    return Tile(128, 128, 32, 8, stages)


def num_splits(programs: int, columns: int, device: torch.device) -> int:
    """Return the number of splits that gives three programs per two processors.

    No split has fewer than 512 columns.
    """
    wanted = triton.cdiv(3 * num_processors(device), 2 * programs)
    return max(1, min(wanted, columns // _LEAST_COLUMNS))
