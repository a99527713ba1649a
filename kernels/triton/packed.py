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
from kernels.triton.launch import num_processors
from kernels.triton.tiles import power_of_two
from kernels.weight import INT4, Operands

if TYPE_CHECKING:
    from kernels.int4 import Int4Weight
    from kernels.mxfp4 import Mxfp4Weight

MOST_TOKENS = 32
_BLOCK = 32  # columns
# 128 and 1024 twice: or-ing a code to the last bits adds it. A register's worth each, since an instruction has room for one constant and the mask is it.
_MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}


class Strip(NamedTuple):
    """The tokens and the rows of a weight that a program has, 16 rows to a tile, and its warps."""

    tokens: int  # 8, 16 or 32
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
def load_words(at, column, end, TILES: tl.constexpr):
    """Of every eight rows [WARPS * 8, 16]. They are read once: what the first-level cache should keep is x, which warps share."""
    found, block = (), column[:, None] + tl.arange(0, 16)[None, :] // 4 * 32
    for i in tl.static_range(2 * TILES):
        found += (tl.load(at[i] + column[:, None] // 8, mask=block < end, other=0, eviction_policy="evict_first"),)
    return found


@jit
def load_factors(at, column, end, BLOCKS: tl.constexpr, LATE: tl.constexpr, TILES: tl.constexpr):
    """Scales or zeros of every eight rows: [WARPS * 8, 4], one for each block of 32 columns from `column` [WARPS * 8] on; late [WARPS * 8]."""
    found = ()
    for i in tl.static_range(2 * TILES):
        if LATE:
            its = tl.load(at[i] + (column // (32 * BLOCKS) if BLOCKS else column * 0), mask=column < end, other=0)
        else:
            block = (column // 32)[:, None] + tl.arange(0, 4)[None, :]
            its = tl.load(at[i][:, None] + (block // BLOCKS if BLOCKS else block * 0), mask=block * 32 < end, other=0)
        found += (its,)
    return found


@jit
def load_late(at, chunk, end, BLOCKS: tl.constexpr, LATE: tl.constexpr, TILES: tl.constexpr):
    """Scales of every tile's rows for chunk [WARPS, 1], [WARPS, 16], where they are late."""
    found = ()
    if LATE:
        mask = (chunk < end) & (tl.arange(0, 16)[None, :] < 16)
        for tile in tl.static_range(TILES):
            found += (tl.load(at[tile] + (chunk // (32 * BLOCKS) if BLOCKS else chunk * 0), mask=mask, other=0.0),)
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
def load_x(x, is_token, column, end, WARPS: tl.constexpr):
    """Words of two columns, pointers [WARPS * 8, 1] to rows, of a chunk: four times [WARPS * 8, 16], 8 columns of each block of 32."""
    word = tl.arange(0, 16)[None, :]
    block = column[:, None] + word // 4 * 32
    mask = is_token & (block < end)
    found, start = (), x + (block // 2 + word % 4)
    for quarter in tl.static_range(4):
        found += (tl.load(start + quarter * 4, mask=mask, other=0),)
    return found


@jit
def x_operands(front, back, type: tl.constexpr, WARPS: tl.constexpr):
    """Of 16 columns in each block of 32, those of `front` before those of `back`: the even ones and the odd ones, [WARPS, 32 columns, 8 tokens] each."""
    low0, high0 = tl.split(tl.reshape(front, (WARPS * 8, 8, 2)))
    low1, high1 = tl.split(tl.reshape(back, (WARPS * 8, 8, 2)))
    even = x_operand((low0 & 0xFFFF) | (high0 << 16), (low1 & 0xFFFF) | (high1 << 16), type, WARPS)
    odd0, odd1 = ((low0 >> 16) & 0xFFFF) | (high0 & -0x10000), ((low1 >> 16) & 0xFFFF) | (high1 & -0x10000)
    return even, x_operand(odd0, odd1, type, WARPS)


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


@jit
def multiply_packed(
    x_at, is_token, words, scales, zeros, first_rows, last_rows, magic, columns, weight_row, scales_row, type,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr, PAIRWISE: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """For each tile of 16 rows and each eight tokens fp32 [16, 8], in one tuple. Of every eight tokens `x_at` has pointers [WARPS * 8, 1] to rows of x, in
    words of two columns, the same for each warp; of every tile `first_rows` its first row, and `last_rows` the one that stands for those behind it. BLOCKS
    of 32 columns have one scale, 0: all. LATE: 128 columns have one, by which their sums are multiplied."""
    warp_row = tl.arange(0, WARPS * 8)
    part, of_eight = warp_row // 8 * 128, warp_row % 8
    word = tl.arange(0, 16)[None, :]
    row_of_tile, part_of_warp = tl.arange(0, 16)[None, :], tl.arange(0, WARPS)[:, None] * 128
    # -136 twice (fp16: -1032); of MXFP4 2^126 (2^14) twice
    BF16: tl.constexpr = -0x3CF73CF8 if FORMAT == 2 else 0x7E807E80
    FP16: tl.constexpr = -0x1BF71BF8 if FORMAT == 2 else 0x74007400
    NUMBER: tl.constexpr = 128.0 if type == tl.bfloat16 else 1024.0
    weight_at, scales_at, zeros_at, late_at, sums = (), (), (), (), ()
    for i in tl.static_range(2 * TILES):
        row = tl.minimum(first_rows[i // 2] + i % 2 * 8 + of_eight, last_rows[i // 2]).to(tl.int64)
        weight_at += ((words + row * weight_row)[:, None] + word,)
        scales_at += (scales + row * scales_row,)
        zeros_at += (zeros + row * scales_row,)
    for tile in tl.static_range(TILES):
        late_at += (scales + tl.minimum(first_rows[tile] + row_of_tile, last_rows[tile]).to(tl.int64) * scales_row,)
    for _ in tl.static_range(TILES * (TOKENS // 8)):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    next_words, next_x, next_late, next_scales, next_zeros = (), (), (), (), ()
    if AHEAD:
        next_words = load_words(weight_at, part, columns, TILES)
        next_late = load_late(late_at, part_of_warp, columns, BLOCKS, LATE, TILES)
        for t in tl.static_range(TOKENS // 8):
            next_x += load_x(x_at[t], is_token[t], part, columns, WARPS)
    # these always: bytes that are loaded where they are used change the order in which Triton has columns in threads
    if not LATE:
        next_scales = load_factors(scales_at, part, columns, BLOCKS, LATE, TILES)
    if HAS_ZEROS:
        next_zeros = load_factors(zeros_at, part, columns, BLOCKS, LATE, TILES)
    for k in tl.range(0, columns, 128 * WARPS, num_stages=1):
        its_words, its_x, its_late, its_scales, its_zeros = next_words, next_x, next_late, next_scales, next_zeros
        next_words, next_x, next_late, next_scales, next_zeros = (), (), (), (), ()
        column = k + part + (128 * WARPS if AHEAD else 0)
        chunk = k + part_of_warp + (128 * WARPS if AHEAD else 0)
        more_words, more_x = load_words(weight_at, column, columns, TILES), ()
        more_late = load_late(late_at, chunk, columns, BLOCKS, LATE, TILES)
        for t in tl.static_range(TOKENS // 8):
            more_x += load_x(x_at[t], is_token[t], column, columns, WARPS)
        if AHEAD:
            next_words, next_x, next_late = more_words, more_x, more_late
        else:
            its_words, its_x, its_late = more_words, more_x, more_late
        if not LATE:
            next_scales = load_factors(scales_at, k + part + 128 * WARPS, columns, BLOCKS, LATE, TILES)
        if HAS_ZEROS:
            next_zeros = load_factors(zeros_at, k + part + 128 * WARPS, columns, BLOCKS, LATE, TILES)
        x_parts, added = (), ()
        for i in tl.static_range(TOKENS // 4):
            x_parts += x_operands(its_x[2 * i], its_x[2 * i + 1], type, WARPS)
        for tile in tl.static_range(TILES):
            centre0 = tl.full([WARPS * 8, 16], BF16 if type == tl.bfloat16 else FP16, tl.int32)
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
                factor = its_late[tile].to(tl.float32)[:, :, None]
            for t in tl.static_range(TOKENS // 8):
                added += (sums[tile * (TOKENS // 8) + t] + products[t] * factor,)
        sums = added
    totals = ()
    for i in tl.static_range(TILES * (TOKENS // 8)):
        totals += (tl.sum(sums[i], axis=0),)
    return totals


@jit(of_batch=("tokens",))
def _multiply(
    x, words, scales, zeros, bias, out, magic,
    x_token, out_token, tokens, rows, columns, weight_row, scales_row,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr,
    PAIRWISE: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    first_rows, last_rows, x_at, is_token = (), (), (), ()
    for tile in tl.static_range(TILES):
        first_rows += (tl.program_id(0) * (16 * TILES) + tile * 16,)
        last_rows += (rows - 1,)
    for t in tl.static_range(TOKENS // 8):
        token = t * 8 + tl.arange(0, WARPS * 8)[:, None] % 8
        x_at += (x + token.to(tl.int64) * x_token,)
        is_token += (token < tokens,)
    totals = multiply_packed(
        x_at, is_token, words, scales, zeros, first_rows, last_rows, magic, columns, weight_row, scales_row, out.dtype.element_ty,
        FORMAT, HAS_ZEROS, BLOCKS, LATE, PAIRWISE, TOKENS, TILES, WARPS, AHEAD,
    )  # fmt: skip
    for tile in tl.static_range(TILES):
        row = first_rows[tile] + tl.arange(0, 16)[:, None]
        for t in tl.static_range(TOKENS // 8):
            token, total = t * 8 + tl.arange(0, 8)[None, :], totals[tile * (TOKENS // 8) + t]
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
    strip = strip or strip_for(tokens, rows, columns, num_processors(x.device))
    words, blocks = _in_words(x), 0 if stored.column_group > columns else stored.column_group // _BLOCK
    _multiply[(triton.cdiv(rows, 16 * strip.tiles),)](
        words, stored.weight.view(torch.int32), stored.scales, stored.zeros, out if bias is None else bias, out, _MAGIC[x.dtype],
        words.stride(0), rows, tokens, rows, columns, stored.weight_row // 4, stored.scales_row,
        FORMAT=stored.format, HAS_ZEROS=stored.has_zeros, HAS_BIAS=bias is not None, BLOCKS=blocks, LATE=stored.format == INT4 and blocks % 4 == 0,
        PAIRWISE=x.is_cuda, TOKENS=strip.tokens, TILES=strip.tiles, WARPS=strip.warps, AHEAD=strip.tokens == 8, num_warps=strip.warps,
    )  # fmt: skip
    return out


def strip_for(tokens: int, rows: int, columns: int, processors: int) -> Strip:
    """Sixteen warps on every processor, of programs of 4 to 16; how many share rows decides in which order columns are added up, and depends on no tokens.
    More tokens take more rows each, because x is read again for each strip of them."""
    padded = max(8, triton.next_power_of_2(tokens))
    strips = triton.cdiv(rows, 16)
    most = min(16, triton.next_power_of_2(triton.cdiv(columns, 128)))
    warps = min(4, most)
    while 2 * warps <= most and 2 * warps * strips <= 16 * processors:
        warps *= 2
    return Strip(padded, 2 if padded > 16 or (padded > 8 and strips >= 2 * processors) else 1, warps)


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] -> [tokens, words of two columns], whole blocks of them."""
    if x.shape[1] % _BLOCK or x.stride(0) % 2 or x.storage_offset() % 2:
        x = F.pad(x, (0, -x.shape[1] % _BLOCK))
    return x.view(torch.int32)
