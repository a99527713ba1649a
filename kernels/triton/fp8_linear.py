"""FP8 (e4m3): activations rounded in one pass, and products of two FP8 matrices.

Tensor cores add up FP8 products with fewer bits than fp32 has; so every 128 columns their sum goes, scaled, into an fp32 accumulator (DeepSeek-V3
technical report, section 3.3). Under Triton's interpreter FP8 values are multiplied as fp16, which holds each of them exactly.
"""

import torch
import triton
import triton.language as tl

from kernels.fp8 import GROUP, LARGEST, Fp8Weight, activation_group
from kernels.triton.jit import jit
from kernels.triton.launch import dense_rows
from kernels.triton.linear import Tile
from kernels.triton.packed import MOST_TOKENS, strip_for

DEPTH = GROUP  # columns a step: no scale changes within


@jit
def _quantise(
    x, scale, values, scales, x_token, scales_token, columns, group, groups, LARGEST: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of one row, in blocks: first its largest value, unless the scale is given, then its rounding."""
    program = tl.program_id(0).to(tl.int64)
    token, of_row = program // groups, program % groups
    begin, i = of_row * group, tl.arange(0, BLOCK)
    end = tl.minimum(begin + group, columns)
    if GIVEN:
        factor = tl.load(scale)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(begin, end, BLOCK):
            column = start + i
            wide = tl.load(x + token * x_token + column, mask=column < end, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(wide))
        factor = tl.math.div_rn(tl.maximum(tl.max(largest, axis=0), 1e-12), LARGEST)
    tl.store(scales + token * scales_token + of_row, factor)
    for start in range(begin, end, BLOCK):
        column = start + i
        wide = tl.load(x + token * x_token + column, mask=column < end, other=0.0).to(tl.float32)
        # divided as IEEE says: the ordinary quotient, 2 units off, would round to another number than the torch form's more often
        wide = tl.math.div_rn(wide, factor)
        tl.store(values + token * columns + column, _rounded(wide, LARGEST), mask=column < end)


@jit
def _rounded(wide, LARGEST: tl.constexpr):
    """The bits of the nearest e4m3 number, to even in the middle. Adding 1.5 * 2^23 steps leaves no bits below a step; the step is that of the
    number's exponent, and of 2^-6 below it."""
    wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
    exponent = tl.maximum((wide.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    shift = ((exponent - 3) << 23).to(tl.float32, bitcast=True) * 12582912.0
    return ((wide + shift) - shift).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@jit(of_batch=("tokens",))
def _multiply(
    x, x_scales, weight, weight_scales, bias, out,
    x_token, x_scales_token, out_token, tokens, rows, columns, weight_row, weight_scales_row, x_group, row_group, column_group, group_tiles,
    EXACT: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token_tiles, row_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    band = program // (group_tiles * row_tiles)
    in_band = tl.minimum(token_tiles - band * group_tiles, group_tiles)
    within = program - band * group_tiles * row_tiles
    token = ((band * group_tiles + within % in_band) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = (within // in_band * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_token, is_row = token < tokens, row < rows
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in range(0, columns, DEPTH):
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
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + token[:, None] * out_token + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@jit(of_batch=("tokens",))
def _multiply_few(
    x, x_scales, weight, weight_scales, bias, out,
    x_token, x_scales_token, out_token, tokens, rows, columns, weight_row, weight_scales_row, row_group,
    X_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr, EXACT: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Up to 16 rows of x. As in kernels/triton/packed.py no value changes its thread: of 64 columns one has 16 that lie side by side, of both. Groups of
    columns that are 0 are all columns."""
    first_row = tl.program_id(0) * (16 * TILES)
    warp_row = tl.arange(0, WARPS * 8)
    part, of_eight, byte = warp_row // 8 * 128, warp_row % 8, tl.arange(0, 64)[None, :]
    row_of_tile, token_of_eight = tl.arange(0, 16)[None, :], tl.arange(0, 8)[None, :]
    part_of_warp = tl.arange(0, WARPS)[:, None] * 128
    weight_at, factors_at, sums = (), (), ()
    for i in tl.static_range(2 * TILES):
        # rows behind the last one compute what it does, and are not stored
        row = tl.minimum(first_row + i * 8 + of_eight, rows - 1).to(tl.int64)
        weight_at += ((weight + row * weight_row)[:, None],)
    for tile in tl.static_range(TILES):
        row = tl.minimum(first_row + tile * 16 + row_of_tile, rows - 1)
        factors_at += (weight_scales + (row // row_group).to(tl.int64) * weight_scales_row,)
    for _ in tl.static_range(TILES * (TOKENS // 8)):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    for k in tl.range(0, columns, 128 * WARPS, num_stages=1):
        column, chunk = (k + part)[:, None] + byte, k + part_of_warp
        x_parts, x_factors, added = (), (), ()
        for t in tl.static_range(TOKENS // 8):
            token = (t * 8 + of_eight).to(tl.int64)[:, None]
            for half in tl.static_range(2):
                mask = (token < tokens) & (column + half * 64 < columns)
                values = tl.load(x + token * x_token + column + half * 64, mask=mask, other=0)
                values = tl.permute(tl.reshape(values, (WARPS, 8, 4, 2, 8)), (0, 3, 2, 4, 1))
                x_parts += (tl.reshape(values, (WARPS, 64, 8)).to(tl.float8e4nv, bitcast=True),)
            at = (t * 8 + token_of_eight).to(tl.int64) * x_scales_token + (chunk // X_GROUP if X_GROUP else chunk * 0)
            x_factors += (tl.load(x_scales + at, mask=(t * 8 + token_of_eight < tokens) & (chunk < columns), other=0.0),)
        for tile in tl.static_range(TILES):
            at = factors_at[tile] + (chunk // COLUMN_GROUP if COLUMN_GROUP else chunk * 0)
            factor = tl.load(at, mask=(chunk < columns) & (row_of_tile < 16), other=0.0)
            products = ()
            for _ in tl.static_range(TOKENS // 8):
                products += (tl.zeros([WARPS, 16, 8], tl.float32),)
            for half in tl.static_range(2):
                more = ()
                mask = column + half * 64 < columns
                values0 = tl.load(weight_at[2 * tile] + column + half * 64, mask=mask, other=0)
                values1 = tl.load(weight_at[2 * tile + 1] + column + half * 64, mask=mask, other=0)
                values = tl.reshape(tl.join(values0, values1), (WARPS, 8, 4, 2, 8, 2))
                values = tl.reshape(tl.permute(values, (0, 5, 1, 3, 2, 4)), (WARPS, 16, 64)).to(tl.float8e4nv, bitcast=True)
                for t in tl.static_range(TOKENS // 8):
                    its_x = x_parts[t * 2 + half]
                    if EXACT:
                        more += (tl.dot(values.to(tl.float16), its_x.to(tl.float16), products[t]),)
                    else:
                        more += (tl.dot(values, its_x, products[t]),)
                products = more
            for t in tl.static_range(TOKENS // 8):
                added += (sums[tile * (TOKENS // 8) + t] + products[t] * factor[:, :, None] * x_factors[t][:, None, :],)
        sums = added
    for tile in tl.static_range(TILES):
        row = first_row + tile * 16 + tl.arange(0, 16)[:, None]
        for t in tl.static_range(TOKENS // 8):
            token = t * 8 + tl.arange(0, 8)[None, :]
            total = tl.sum(sums[tile * (TOKENS // 8) + t], axis=0)
            if HAS_BIAS:
                total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
            target = out + token.to(tl.int64) * out_token + row
            tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows) & (token < tokens))


def quantise_fp8(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as kernels/fp8.py."""
    x = dense_rows(x)
    tokens, columns = x.shape
    groups = -(-columns // group)
    values = torch.empty((tokens, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    if values.numel():
        block = min(1024, triton.next_power_of_2(min(group, columns)))
        _quantise[(tokens * groups,)](
            x, x if scale is None else scale, values, scales, x.stride(0), groups, columns, group, groups,
            LARGEST=LARGEST, GIVEN=scale is not None, BLOCK=block, num_warps=1 if block <= 256 else 4,
        )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scales


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as kernels/fp8.py."""
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    assert weight.values.stride(1) == 1, "columns must be contiguous"
    tokens, columns = x.shape
    rows, x_group = weight.values.shape[0], activation_group(weight)
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    values, scales = quantise_fp8(x, x_group, weight.input_scale)
    stored, weight_scales = weight.values.view(torch.uint8), weight.scales.contiguous()
    operands = values.view(torch.uint8), scales, stored, weight_scales, out if bias is None else bias, out
    sizes = columns, scales.stride(0), rows, tokens, rows, columns, stored.stride(0), weight_scales.stride(0)
    column_group = 0 if weight.column_group >= columns else weight.column_group
    if tokens <= MOST_TOKENS:
        strip = strip_for(tokens, rows, columns)
        _multiply_few[(triton.cdiv(rows, 16 * strip.tiles),)](
            *operands, *sizes, weight.row_group, X_GROUP=0 if x_group >= columns else x_group, COLUMN_GROUP=column_group,
            EXACT=not x.is_cuda, HAS_BIAS=bias is not None, TOKENS=8 if tokens <= 8 else 16, TILES=strip.tiles, WARPS=strip.warps,
            num_warps=strip.warps,
        )  # fmt: skip
        return out
    tile = tile_for(tokens)
    _multiply[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(rows, tile.rows),)](
        *operands, *sizes, x_group, weight.row_group, column_group or columns + 1, 8,
        EXACT=not x.is_cuda, HAS_BIAS=bias is not None, TOKENS=tile.tokens, ROWS=tile.rows, DEPTH=DEPTH,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def tile_for(tokens: int) -> Tile:
    if tokens <= 64:
        return Tile(64, 64, DEPTH // 2, 4, 4)
    return Tile(128, 128, DEPTH // 2, 8, 3)
