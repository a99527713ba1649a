"""FP8 (e4m3): rounding of activations, and products of two FP8 matrices.

cuBLAS computes products of many rows with one scale per row on both sides. Tensor cores add FP8 products with fewer bits than fp32 has; so after
every 128 columns their sum is scaled and added to an fp32 accumulator (DeepSeek-V3 technical report, section 3.3). Under Triton's interpreter FP8
values are multiplied as fp16, which holds each of them exactly.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.matrices.fp8 import GROUP, LARGEST, Fp8Weight, activation_group, spread
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import dense_rows, is_hopper
from pilotlight.kernels.triton.matrices.linear import Tile, num_splits, sum_parts

DEPTH = GROUP  # columns per step, which share one scale
_FEW = 16  # rows of x in the smallest tile
_QUANTISED = 2048  # values per program if rows have several groups


@jit(of_batch=("tokens",))
def _quantise(
    x, scale, values, scales, x_token, tokens, columns, group, groups,
    LARGEST: tl.constexpr, GIVEN: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round GROUPS groups of columns, each whole in registers, with a given scale or with one scale each."""
    i = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    token, of_row, within = i // groups, i % groups, tl.arange(0, BLOCK)[None, :]
    column, is_token = of_row[:, None] * group + within, token < tokens
    mask = is_token[:, None] & (within < group) & (column < columns)
    wide = tl.load(x + token[:, None] * x_token + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.zeros([GROUPS], tl.float32)
    if GIVEN:
        factor += tl.load(scale)
    else:
        factor += tl.math.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-12), LARGEST)
    tl.store(scales + i, factor, mask=is_token)
    # IEEE division: the fast quotient is off by up to 2 units, and would more often round to another number than in the torch form
    wide = tl.math.div_rn(wide, factor[:, None])
    tl.store(values + token[:, None] * columns + column, _rounded(wide, LARGEST), mask=mask)


@jit
def _rounded(wide, LARGEST: tl.constexpr):
    """Return the bits of the nearest e4m3 number, ties to even.

    Adding 1.5 * 2^23 steps rounds off all bits below a step. The step is that of the number's exponent, or that of 2^-6 for smaller numbers.
    """
    wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
    exponent = tl.maximum((wide.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    shift = ((exponent - 3) << 23).to(tl.float32, bitcast=True) * 12582912.0
    return ((wide + shift) - shift).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@jit(of_batch=("tokens", "splits"))
def _multiply(
    x, x_scales, weight, weight_scales, bias, out,
    x_token, x_scales_token, out_token, out_split, tokens, rows, columns, weight_row, weight_scales_row, x_group, row_group, column_group,
    split_columns, splits, group_tiles,
    EXACT: tl.constexpr, HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split, program = program % splits, program // splits
    token_tiles, row_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    band = program // (group_tiles * row_tiles)
    in_band = tl.minimum(token_tiles - band * group_tiles, group_tiles)
    within = program - band * group_tiles * row_tiles
    token = ((band * group_tiles + within % in_band) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = (within // in_band * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_token, is_row = token < tokens, row < rows
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, columns)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in range(begin, end, DEPTH):
        column = k + tl.arange(0, DEPTH)
        inside = (column < columns)[None, :]
        left = tl.load(x + token[:, None] * x_token + column[None, :], mask=is_token[:, None] & inside, other=0)
        right = tl.load(weight + row[:, None] * weight_row + column[None, :], mask=is_row[:, None] & inside, other=0)
        left, right = left.to(tl.float8e4nv, bitcast=True), right.to(tl.float8e4nv, bitcast=True)
        if EXACT:
            left, right = left.to(tl.float16), right.to(tl.float16)
        left_scale = tl.load(x_scales + token * x_scales_token + k // x_group, mask=is_token, other=0.0)
        right_scale = tl.load(
            weight_scales + row // row_group * weight_scales_row + k // column_group, mask=is_row, other=0.0
        )
        sums += tl.dot(left, tl.trans(right)) * left_scale[:, None] * right_scale[None, :]
    if HAS_BIAS and DIRECT:
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + split.to(tl.int64) * out_split + token[:, None] * out_token + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


def quantise_fp8(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute quantise_fp8 of kernels/matrices/fp8.py."""
    x = dense_rows(x)
    tokens, columns = x.shape
    groups = -(-columns // group)
    values = torch.empty((tokens, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    if values.numel():
        block = triton.next_power_of_2(min(group, columns))
        together = max(1, _QUANTISED // block)
        _quantise[(triton.cdiv(tokens * groups, together),)](
            x, x if scale is None else scale, values, scales, x.stride(0), tokens, columns, group, groups,
            LARGEST=LARGEST, GIVEN=scale is not None, GROUPS=together, BLOCK=block, num_warps=max(4, min(16, block // 1024)),
        )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scales


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute fp8_linear of kernels/matrices/fp8.py."""
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    assert weight.values.stride(1) == 1, "columns must be contiguous"
    tokens, columns = x.shape
    rows, x_group = weight.values.shape[0], activation_group(weight)
    if not tokens or not rows:
        return x.new_empty((tokens, rows))
    values, scales = quantise_fp8(x, x_group, weight.input_scale)
    if is_cublas(x, weight):
        of_rows = spread(weight.scales, weight.row_group, columns, rows, columns).t()
        return torch._scaled_mm(values, weight.values.t(), scales, of_rows, bias=bias, out_dtype=x.dtype)
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    stored, weight_scales = weight.values.view(torch.uint8), weight.scales.contiguous()
    tile = tile_for(tokens)
    programs = triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows)
    splits = 1
    if tokens <= _FEW:
        splits = num_splits(programs, columns, x.device)
    split_columns = triton.cdiv(triton.cdiv(columns, splits), DEPTH) * DEPTH
    splits = triton.cdiv(columns, split_columns)
    parts = out if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    column_group = columns + 1 if weight.column_group >= columns else weight.column_group
    _multiply[(programs * splits,)](
        values.view(torch.uint8), scales, stored, weight_scales, out if bias is None else bias, parts,
        columns, scales.stride(0), rows, 0 if splits == 1 else tokens * rows, tokens, rows, columns, stored.stride(0), weight_scales.stride(0),
        x_group, weight.row_group, column_group, split_columns, splits, 8,
        EXACT=not x.is_cuda, HAS_BIAS=bias is not None, DIRECT=splits == 1, TOKENS=tile.tokens, ROWS=tile.rows, DEPTH=DEPTH,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        sum_parts(parts, bias, out)
    return out


def is_cublas(x: torch.Tensor, weight: Fp8Weight) -> bool:
    """True if cuBLAS computes the product: more than a few rows, with one scale per row on both sides.

    For 512 rows and 4096 x 4096 it took 22 us on an H100, and the tiles of this module 54.
    """
    rows, columns = weight.values.shape
    of_rows = weight.column_group >= columns and rows % 16 == 0 and columns % 16 == 0 and weight.values.is_contiguous()
    return x.is_cuda and x.shape[0] > _FEW and x.dtype == torch.bfloat16 and of_rows and is_hopper(x.device)


def tile_for(tokens: int) -> Tile:
    if tokens <= _FEW:
        return Tile(16, 32, DEPTH // 2, 4, 4)
    if tokens <= 64:
        return Tile(64, 64, DEPTH // 2, 4, 4)
    return Tile(128, 128, DEPTH // 2, 8, 3)
