"""Products of up to 16 rows of x with a weight of four bits, which is decoded in the very registers that tensor cores multiply.

A warp has some rows of the weight and every WARPS-th run of 128 columns; warps of a program share rows, and add up at the end. A thread loads 16 bytes
of a row, which are a block of 32 columns, and of x the same columns. Tensor cores want certain columns of certain threads, but which they are called
does not matter as long as those of x are called alike: columns are multiplied in the order in which they lie in threads, so nothing goes through shared
memory (tests/kernels/triton/test_matrices_compile.py looks for it). That takes 2.5 instructions a weight; an H100 that reads 3 TB/s has time for 5.4.
How columns are added up depends on the weight alone, so a row of x has the same bits in any company of up to 16.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.triton import linear
from kernels.triton.jit import jit
from kernels.triton.tiles import power_of_two
from kernels.weight import INT4, Operands

if TYPE_CHECKING:
    from kernels.int4 import Int4Weight
    from kernels.mxfp4 import Mxfp4Weight

MOST_TOKENS = 16
_BLOCK = 32  # columns
# 128 and 1024 twice: or-ing a code to the last bits adds it. A register's worth each, since an instruction has room for one constant and the mask is it.
_MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}


class Strip(NamedTuple):
    """The rows of a weight that a program has, 16 to a tile, and its warps."""

    tiles: int
    warps: int


@jit
def halves(pair, type: tl.constexpr):
    """int32 -> the numbers of 16 bits in its low and its high half."""
    return (pair & 0xFFFF).to(tl.int16).to(type, bitcast=True), (pair >> 16).to(tl.int16).to(type, bitcast=True)


@jit
def twice(value, type: tl.constexpr):
    """fp32 -> the same number of 16 bits in both halves of an int32."""
    bits = value.to(type).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@jit
def shifted(word, LEFT: tl.constexpr):
    if LEFT >= 0:
        moved = word << LEFT
    else:
        moved = word >> (0 - LEFT)
    return moved


@jit
def codes_of(word, magic, SHIFT: tl.constexpr, FORMAT: tl.constexpr, type: tl.constexpr):
    """The codes at bits SHIFT and SHIFT + 16 of a word, as two numbers: of INT4 with 128 added (fp16: 1024), of MXFP4, whose exponent is where that of
    such a number begins, times 2^-126 (fp16: 2^-14)."""
    if FORMAT == 2:
        pair = (shifted(word, 0 - SHIFT) & 0x000F000F) | magic
    elif type == tl.bfloat16:
        pair = (shifted(word, 6 - SHIFT) & 0x01C001C0) | (shifted(word, 12 - SHIFT) & -0x7FFF8000)
    else:
        pair = (shifted(word, 9 - SHIFT) & 0x0E000E00) | (shifted(word, 12 - SHIFT) & -0x7FFF8000)
    return pair


@jit
def multiply_add(a, b, c, type: tl.constexpr):
    """a * b + c of two numbers each, rounded once."""
    if type == tl.bfloat16:
        both = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        both = tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    return both


@jit
def decode(pair, centre, factor, FORMAT: tl.constexpr, LATE: tl.constexpr, type: tl.constexpr, PAIRWISE: tl.constexpr):
    """What two codes stand for, as two tensors: of INT4 pair + centre, of MXFP4 pair * centre, both exactly; and unless LATE times factor, rounded. Two
    at a time where PTX can be written, `PAIRWISE`."""
    if PAIRWISE:
        nothing = pair * 0 + -0x7FFF8000  # -0.0, which changes no sum
        if FORMAT == 2:
            pair = multiply_add(pair, pair * 0 + (0x3F803F80 if type == tl.bfloat16 else 0x3C003C00), centre, type)
        else:
            pair = multiply_add(pair, centre, nothing, type)
        if not LATE:
            pair = multiply_add(pair, factor, nothing, type)
        low, high = halves(pair, type)
    else:
        low, high = halves(pair, type)
        centre_low, centre_high = halves(centre, type)
        low = low + centre_low if FORMAT == 2 else low * centre_low
        high = high + centre_high if FORMAT == 2 else high * centre_high
        if not LATE:
            factor_low, factor_high = halves(factor, type)
            low, high = low * factor_low, high * factor_high
    return low, high


@jit
def load_factors(base, column, end, BLOCKS: tl.constexpr, LATE: tl.constexpr):
    """Scales or zeros of rows, [WARPS * 8, 4], one for each block of 32 columns from `column` [WARPS * 8] on; late one for all four, [WARPS * 8]."""
    if LATE:
        found = tl.load(base + (column // (32 * BLOCKS) if BLOCKS else column * 0), mask=column < end, other=0)
    else:
        block = (column // 32)[:, None] + tl.arange(0, 4)[None, :]
        at = block // BLOCKS if BLOCKS else block * 0
        found = tl.load(base[:, None] + at, mask=block * 32 < end, other=0)
    return found


@jit
def for_words(value, LATE: tl.constexpr, LANES: tl.constexpr):
    """[LANES, 4], late [LANES] -> [LANES, 16], for each word the one of its block."""
    if LATE:
        spread = tl.broadcast_to(value[:, None], (LANES, 16))
    else:
        spread = tl.reshape(tl.broadcast_to(value[:, :, None], (LANES, 4, 4)), (LANES, 16))
    return spread


@jit
def x_operands(x, is_token, column, end, HALF: tl.constexpr, type: tl.constexpr, WARPS: tl.constexpr):
    """Two operands [WARPS, 32 columns, 8 tokens] of x, pointers to words of two columns [WARPS * 8, 1]: in each block of 32 columns the first 16, or with
    HALF the others; even ones, and odd ones."""
    word = tl.arange(0, 16)[None, :]
    block = column[:, None] + word // 4 * 32
    mask = is_token & (block < end)
    start = x + (block // 2 + HALF * 8 + word % 4)
    low0, high0 = tl.split(tl.reshape(tl.load(start, mask=mask, other=0), (WARPS * 8, 8, 2)))
    low1, high1 = tl.split(tl.reshape(tl.load(start + 4, mask=mask, other=0), (WARPS * 8, 8, 2)))
    even = x_operand((low0 & 0xFFFF) | (high0 << 16), (low1 & 0xFFFF) | (high1 << 16), type, WARPS)
    odd = x_operand(((low0 >> 16) & 0xFFFF) | (high0 & -0x10000), ((low1 >> 16) & 0xFFFF) | (high1 & -0x10000), type, WARPS)
    return even, odd


@jit
def x_operand(front, back, type: tl.constexpr, WARPS: tl.constexpr):
    """Pairs of columns [WARPS * 8 tokens, 4 blocks * 2], and those four columns behind -> [WARPS, 32, 8]."""
    front_low, front_high = halves(front, type)
    back_low, back_high = halves(back, type)
    values = tl.join(tl.join(front_low, front_high), tl.join(back_low, back_high))
    values = tl.reshape(values, (WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 5, 2, 3, 4, 1)), (WARPS, 32, 8))


@jit
def weight_operand(low0, high0, low1, high1, WARPS: tl.constexpr):
    """Columns of 8 rows, first and second of pairs, [WARPS * 8, 4 blocks * 2 * 2], and those of 8 more -> [WARPS, 16, 32], columns as x has them."""
    values = tl.reshape(tl.join(tl.join(low0, high0), tl.join(low1, high1)), (WARPS, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 6, 1, 3, 2, 4, 5)), (WARPS, 16, 32))


@jit(of_batch=("tokens",))
def _multiply(
    x, words, scales, zeros, bias, out, magic,
    x_token, out_token, tokens, rows, columns, weight_row, scales_row,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr,
    PAIRWISE: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """x, in words of two columns; BLOCKS of 32 columns have one scale, 0: all. LATE: a chunk of 128 columns has one, by which its sums are multiplied."""
    type = out.dtype.element_ty
    first_row = tl.program_id(0) * (16 * TILES)
    warp_row = tl.arange(0, WARPS * 8)
    part, of_eight = warp_row // 8 * 128, warp_row % 8
    word = tl.arange(0, 16)[None, :]
    row_of_tile, part_of_warp = tl.arange(0, 16)[None, :], tl.arange(0, WARPS)[:, None] * 128
    # -136 twice (fp16: -1032); of MXFP4 2^126 (2^14) twice
    CENTRE: tl.constexpr = (-0x3CF73CF8 if FORMAT == 2 else 0x7E807E80) if type == tl.bfloat16 else (-0x1BF71BF8 if FORMAT == 2 else 0x74007400)
    NUMBER: tl.constexpr = 128.0 if type == tl.bfloat16 else 1024.0
    weight_at, scales_at, zeros_at, next_scales, next_zeros, sums = (), (), (), (), (), ()
    for i in tl.static_range(2 * TILES):
        # rows behind the last one compute what it does, and are not stored
        row = tl.minimum(first_row + i * 8 + of_eight, rows - 1).to(tl.int64)
        weight_at += ((words + row * weight_row)[:, None] + word,)
        scales_at += (scales + row * scales_row,)
        zeros_at += (zeros + row * scales_row,)
        # One step ahead: bytes that are loaded where they are used change the order in which Triton has columns in threads.
        if not LATE:
            next_scales += (load_factors(scales_at[i], part, columns, BLOCKS, LATE),)
        if HAS_ZEROS:
            next_zeros += (load_factors(zeros_at[i], part, columns, BLOCKS, LATE),)
    for _ in tl.static_range(TILES * (TOKENS // 8)):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    for k in tl.range(0, columns, 128 * WARPS, num_stages=1):
        column = k + part
        mask = column[:, None] + word // 4 * 32 < columns
        its_words, its_scales, its_zeros, x_parts, added = (), next_scales, next_zeros, (), ()
        next_scales, next_zeros = (), ()
        for i in tl.static_range(2 * TILES):
            its_words += (tl.load(weight_at[i] + column[:, None] // 8, mask=mask, other=0),)
            if not LATE:
                next_scales += (load_factors(scales_at[i], column + 128 * WARPS, columns, BLOCKS, LATE),)
            if HAS_ZEROS:
                next_zeros += (load_factors(zeros_at[i], column + 128 * WARPS, columns, BLOCKS, LATE),)
        for t in tl.static_range(TOKENS // 8):
            token = t * 8 + of_eight
            its_x, is_token = (x + token.to(tl.int64) * x_token)[:, None], (token < tokens)[:, None]
            for half in tl.static_range(2):
                x_parts += x_operands(its_x, is_token, column, columns, half, type, WARPS)
        for tile in tl.static_range(TILES):
            centre0 = tl.full([WARPS * 8, 16], CENTRE, tl.int32)
            centre1, factor0, factor1 = centre0, centre0, centre0
            if HAS_ZEROS:
                centre0 = for_words(twice(-NUMBER - its_zeros[2 * tile].to(tl.float32), type), LATE, WARPS * 8)
                centre1 = for_words(twice(-NUMBER - its_zeros[2 * tile + 1].to(tl.float32), type), LATE, WARPS * 8)
            if not LATE:
                factor0 = for_words(twice(as_fp32(its_scales[2 * tile], FORMAT), type), LATE, WARPS * 8)
                factor1 = for_words(twice(as_fp32(its_scales[2 * tile + 1], FORMAT), type), LATE, WARPS * 8)
            products = ()
            for _ in tl.static_range(TOKENS // 8):
                products += (tl.zeros([WARPS, 16, 8], tl.float32),)
            for quarter in tl.static_range(4):
                codes0 = codes_of(its_words[2 * tile], magic, quarter // 2 * 4 + quarter % 2 * 8, FORMAT, type)
                codes1 = codes_of(its_words[2 * tile + 1], magic, quarter // 2 * 4 + quarter % 2 * 8, FORMAT, type)
                low0, high0 = decode(codes0, centre0, factor0, FORMAT, LATE, type, PAIRWISE)
                low1, high1 = decode(codes1, centre1, factor1, FORMAT, LATE, type, PAIRWISE)
                weights, more = weight_operand(low0, high0, low1, high1, WARPS), ()
                for t in tl.static_range(TOKENS // 8):
                    more += (tl.dot(weights, x_parts[t * 4 + quarter], products[t]),)
                products = more
            factor = 1.0
            if LATE:
                its_row = tl.minimum(first_row + tile * 16 + row_of_tile, rows - 1).to(tl.int64)
                chunk = k + part_of_warp
                at = scales + its_row * scales_row + (chunk // (32 * BLOCKS) if BLOCKS else chunk * 0)
                factor = tl.load(at, mask=chunk < columns, other=0.0).to(tl.float32)[:, :, None]
            for t in tl.static_range(TOKENS // 8):
                added += (sums[tile * (TOKENS // 8) + t] + products[t] * factor,)
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


@jit
def as_fp32(scale, FORMAT: tl.constexpr):
    return scale.to(tl.float32) if FORMAT == 2 else power_of_two(scale)


def int4_linear(x: torch.Tensor, weight: "Int4Weight", bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as kernels/int4.py."""
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    return product(x, weight.operands(), bias)


def mxfp4_linear(x: torch.Tensor, weight: "Mxfp4Weight", bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as kernels/mxfp4.py."""
    return product(x, weight.operands(), bias)


def product(x: torch.Tensor, stored: Operands, bias: torch.Tensor | None, strip: Strip | None = None) -> torch.Tensor:
    """[tokens, rows]; with a strip given, by this: `tune` tries some."""
    tokens, columns = x.shape
    rows = stored.rows
    if x.dtype not in _MAGIC or not 0 < tokens <= MOST_TOKENS or not rows or not columns:
        return linear.product(x, stored, bias)
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    strip = strip or strip_for(tokens, rows, columns)
    words, blocks = _in_words(x), 0 if stored.column_group > columns else stored.column_group // _BLOCK
    _multiply[(triton.cdiv(rows, 16 * strip.tiles),)](
        words, stored.weight.view(torch.int32), stored.scales, stored.zeros, out if bias is None else bias, out, _MAGIC[x.dtype],
        words.stride(0), rows, tokens, rows, columns, stored.weight_row // 4, stored.scales_row,
        FORMAT=stored.format, HAS_ZEROS=stored.has_zeros, HAS_BIAS=bias is not None, BLOCKS=blocks, LATE=stored.format == INT4 and blocks % 4 == 0,
        PAIRWISE=x.is_cuda, TOKENS=8 if tokens <= 8 else 16, TILES=strip.tiles, WARPS=strip.warps, num_warps=strip.warps,
    )  # fmt: skip
    return out


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, words of two columns], whole blocks of them."""
    if x.shape[1] % _BLOCK or x.stride(0) % 2 or x.storage_offset() % 2:
        x = F.pad(x, (0, -x.shape[1] % _BLOCK))
    return x.view(torch.int32)


def strip_for(tokens: int, rows: int, columns: int) -> Strip:
    return Strip(1, 8)
