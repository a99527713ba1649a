"""Products of up to 64 rows of x with a four-bit weight, decoded in the tensor cores' registers.

A warp has some rows of the weight, 16 per tile, and every WARPS-th run of 128 columns. The warps of a program share rows, and add their sums at the
end. A thread loads 16 bytes of a row, which are a block of 32 columns, and the same columns of x. Tensor cores expect certain columns in certain
threads, but any order is right that is the same for both operands. So columns are multiplied in the order in which threads hold them, and nothing
passes through shared memory (tests/kernels/triton/test_matrices_compile.py checks that). A weight takes 3 instructions; an H100 that reads 3 TB/s has
time for 5.4. The order in which columns are added depends only on the weight: a row of x has the same bits in any batch. For more rows the weight is
decoded into memory, which cuBLAS reads.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pilotlight.kernels.matrices.weight import INT4, MXFP4, Operands
from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import num_processors
from pilotlight.kernels.triton.matrices import linear
from pilotlight.kernels.triton.matrices.tiles import e2m1, power_of_two

if TYPE_CHECKING:
    from pilotlight.kernels.matrices.int4 import Int4Weight
    from pilotlight.kernels.matrices.mxfp4 import Mxfp4Weight

MOST_TOKENS = 32  # most rows of x per program
_BLOCK = 32  # columns per block of codes
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NEAR_BYTES = 32 << 20  # most bytes of decoded rows of which the L2 still has all when cuBLAS reads them
# The bits of 128 (fp16: 1024) in both halves of a word: or-ing a code into the last bits adds it. The number is passed as an argument because an
# instruction can hold one constant, which is the mask.
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
# Registers that a thread may use, by tokens and tiles. Without a limit, the assembler saves registers by loading a step's operands only after the
# previous step's products.
REGISTERS = {(8, 1): 112, (8, 2): 168, (16, 1): 128, (16, 2): 168, (32, 2): 255}


class Strip(NamedTuple):
    """The part of a product that one program computes: tokens, tiles of 16 weight rows, and its warps."""

    tokens: int  # 8, 16 or 32
    tiles: int
    warps: int


@jit
def none():
    """Return an empty tuple, to which an unrolled loop appends."""
    return ()


@jit
def halves(pair, type: tl.constexpr):
    """Split int32 into two 16-bit numbers: its low and its high half."""
    return (pair & 0xFFFF).to(tl.int16).to(type, bitcast=True), (pair >> 16).to(tl.int16).to(type, bitcast=True)


@jit
def twice(value, type: tl.constexpr):
    """Return an fp32 number, as 16 bits, in both halves of an int32."""
    bits = value.to(type).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@jit
def shifted(word, LEFT: tl.constexpr):
    return word << LEFT if LEFT >= 0 else word >> (0 - LEFT)


@jit
def codes_of(word, magic, SHIFT: tl.constexpr, FORMAT: tl.constexpr, type: tl.constexpr):
    """Extract the codes at bits SHIFT and SHIFT + 16 of a word, as two numbers.

    INT4 codes are returned plus 128 (fp16: 1024). MXFP4 values are returned times 2^-126 (fp16: 2^-14), because their exponents become the last bits
    of the numbers' exponents.
    """
    if FORMAT == 2:
        pair = (shifted(word, 0 - SHIFT) & 0x000F000F) | magic
    elif type == tl.bfloat16:
        pair = (shifted(word, 6 - SHIFT) & 0x01C001C0) | (shifted(word, 12 - SHIFT) & -0x7FFF8000)
    else:
        pair = (shifted(word, 9 - SHIFT) & 0x0E000E00) | (shifted(word, 12 - SHIFT) & -0x7FFF8000)
    return pair


@jit
def multiply_add(a, b, c, type: tl.constexpr):
    """Return a * b + c for pairs of numbers, rounded once."""
    if type == tl.bfloat16:
        both = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        both = tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    return both


@jit
def decode(pair, centre, factor, FORMAT: tl.constexpr, LATE: tl.constexpr, type: tl.constexpr, PAIRWISE: tl.constexpr):
    """Return the values of two codes: pair + centre for INT4, pair * centre for MXFP4, exactly.

    Unless LATE they are multiplied by factor and rounded. `PAIRWISE` computes two at a time, with PTX.
    """
    if PAIRWISE:
        nothing = pair * 0 + -0x7FFF8000  # -0.0, whose addition changes nothing
        if FORMAT == 2:
            one = pair * 0 + (0x3F803F80 if type == tl.bfloat16 else 0x3C003C00)
            pair = multiply_add(pair, one, centre, type)
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
def load_step(
    weight_at, late_at, x_at, is_token, k, end,
    BLOCKS: tl.constexpr, LATE: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load what one step multiplies: 128 columns per warp from column k on.

    These are words of the weight, words of x and, if LATE, the scales of tiles.
    """
    column, chunk = k + tl.arange(0, WARPS * 8) // 8 * 128, k + tl.arange(0, WARPS)[:, None] * 128
    word = tl.arange(0, 16)[None, :]
    block = column[:, None] + word // 4 * 32
    words, late, of_x = none(), none(), none()
    for i in tl.static_range(2 * TILES):
        at = weight_at[i] + column[:, None] // 8
        # evicted first, because they are read once, and the first-level cache should keep x, which strips share
        words += (tl.load(at, mask=block < end, other=0, eviction_policy="evict_first"),)
    for tile in tl.static_range(TILES if LATE else 0):
        at = late_at[tile] + (chunk // (32 * BLOCKS) if BLOCKS else chunk * 0)
        late += (tl.load(at, mask=(chunk < end) & (word >= 0), other=0.0),)
    for t in tl.static_range(TOKENS // 8):
        for quarter in tl.static_range(4):
            at = x_at[t] + (block // 2 + word % 4) + quarter * 4
            of_x += (tl.load(at, mask=is_token[t] & (block < end), other=0),)
    return words, late, of_x


@jit
def load_factors(at, k, end, BLOCKS: tl.constexpr, LATE: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Load scales or zeros of every eight rows: [WARPS * 8, 4], one per block of 32 columns.

    If LATE, [WARPS * 8].
    """
    column, found = k + tl.arange(0, WARPS * 8) // 8 * 128, none()
    for i in tl.static_range(2 * TILES):
        if LATE:
            group = column // (32 * BLOCKS) if BLOCKS else column * 0
            found += (tl.load(at[i] + group, mask=column < end, other=0),)
        else:
            block = (column // 32)[:, None] + tl.arange(0, 4)[None, :]
            group = block // BLOCKS if BLOCKS else block * 0
            found += (tl.load(at[i][:, None] + group, mask=block * 32 < end, other=0),)
    return found


@jit
def as_fp32(scale, FORMAT: tl.constexpr):
    return power_of_two(scale) if FORMAT == 3 else scale.to(tl.float32)


@jit
def for_words(value, LATE: tl.constexpr, LANES: tl.constexpr):
    """Repeat [LANES, 4] (if LATE, [LANES]) to [LANES, 16], so that each word has the value of its block."""
    wide = value[:, None, None] if LATE else value[:, :, None]
    return tl.reshape(tl.broadcast_to(wide, (LANES, 4, 4)), (LANES, 16))


@jit
def x_operands(front, back, type: tl.constexpr, WARPS: tl.constexpr):
    """Arrange 16 columns of each block of 32, `front` before `back`, as even and odd ones.

    Each result is [WARPS, 32 columns, 8 tokens].
    """
    low0, high0 = tl.split(tl.reshape(front, (WARPS * 8, 8, 2)))
    low1, high1 = tl.split(tl.reshape(back, (WARPS * 8, 8, 2)))
    even = x_operand((low0 & 0xFFFF) | (high0 << 16), (low1 & 0xFFFF) | (high1 << 16), type, WARPS)
    odd0, odd1 = ((low0 >> 16) & 0xFFFF) | (high0 & -0x10000), ((low1 >> 16) & 0xFFFF) | (high1 & -0x10000)
    return even, x_operand(odd0, odd1, type, WARPS)


@jit
def x_operand(front, back, type: tl.constexpr, WARPS: tl.constexpr):
    """Arrange pairs of columns [WARPS * 8 tokens, 4 blocks * 2], and the next four, as [WARPS, 32, 8]."""
    front_low, front_high = halves(front, type)
    back_low, back_high = halves(back, type)
    values = tl.join(tl.join(front_low, front_high), tl.join(back_low, back_high))
    values = tl.reshape(values, (WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 5, 2, 3, 4, 1)), (WARPS, 32, 8))


@jit
def weight_operand(low0, high0, low1, high1, WARPS: tl.constexpr):
    """Arrange columns of 8 rows and of 8 more as [WARPS, 16, 32], columns in the order of x.

    Each argument is the first or second of pairs, [WARPS * 8, 4 blocks * 2 * 2].
    """
    values = tl.reshape(tl.join(tl.join(low0, high0), tl.join(low1, high1)), (WARPS, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 6, 1, 3, 2, 4, 5)), (WARPS, 16, 32))


@jit
def multiply_step(
    sums, step, scales, zeros, magic, type: tl.constexpr,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, LATE: tl.constexpr, PAIRWISE: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return sums plus the product of a step's loaded operands."""
    words, late, of_x = step
    # -136 in both halves (fp16: -1032); for MXFP4 2^126 (2^14) in both
    BF16: tl.constexpr = -0x3CF73CF8 if FORMAT == 2 else 0x7E807E80
    FP16: tl.constexpr = -0x1BF71BF8 if FORMAT == 2 else 0x74007400
    NUMBER: tl.constexpr = 128.0 if type == tl.bfloat16 else 1024.0
    x_parts, added = none(), none()
    for i in tl.static_range(TOKENS // 4):
        x_parts += x_operands(of_x[2 * i], of_x[2 * i + 1], type, WARPS)
    for tile in tl.static_range(TILES):
        centre0 = tl.full([WARPS * 8, 16], BF16 if type == tl.bfloat16 else FP16, tl.int32)
        centre1, factor0, factor1 = centre0, centre0, centre0
        if HAS_ZEROS:
            centre0 = for_words(twice(-NUMBER - zeros[2 * tile].to(tl.float32), type), LATE, WARPS * 8)
            centre1 = for_words(twice(-NUMBER - zeros[2 * tile + 1].to(tl.float32), type), LATE, WARPS * 8)
        if not LATE:
            factor0 = for_words(twice(as_fp32(scales[2 * tile], FORMAT), type), LATE, WARPS * 8)
            factor1 = for_words(twice(as_fp32(scales[2 * tile + 1], FORMAT), type), LATE, WARPS * 8)
        products = none()
        for _ in tl.static_range(TOKENS // 8):
            products += (tl.zeros([WARPS, 16, 8], tl.float32),)
        for quarter in tl.static_range(4):
            codes0 = codes_of(words[2 * tile], magic, quarter // 2 * 4 + quarter % 2 * 8, FORMAT, type)
            codes1 = codes_of(words[2 * tile + 1], magic, quarter // 2 * 4 + quarter % 2 * 8, FORMAT, type)
            low0, high0 = decode(codes0, centre0, factor0, FORMAT, LATE, type, PAIRWISE)
            low1, high1 = decode(codes1, centre1, factor1, FORMAT, LATE, type, PAIRWISE)
            weights, more = weight_operand(low0, high0, low1, high1, WARPS), none()
            for t in tl.static_range(TOKENS // 8):
                more += (tl.dot(weights, x_parts[t * 4 + quarter], products[t]),)
            products = more
        factor = 1.0
        if LATE:
            factor = as_fp32(late[tile], FORMAT)[:, :, None]
        for t in tl.static_range(TOKENS // 8):
            added += (sums[tile * (TOKENS // 8) + t] + products[t] * factor,)
    return added


@jit
def multiply_packed(
    x_at, is_token, words, scales, zeros, first_rows, last_rows, magic, columns, weight_row, scales_row, type: tl.constexpr,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr, LATE: tl.constexpr, PAIRWISE: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return fp32 [16, 8] for each tile of 16 rows and each eight tokens, in one tuple.

    `x_at` has, for every eight tokens, pointers [WARPS * 8, 1] to rows of x in words of two columns, the same for each warp; `first_rows` and
    `last_rows` have each tile's first row and the row that replaces those past the end. BLOCKS of 32 columns share one scale (0: all). LATE: 128
    columns share a scale, by which their sums are multiplied.
    """
    STEP: tl.constexpr = 128 * WARPS
    of_eight, of_tile = tl.arange(0, WARPS * 8) % 8, tl.arange(0, 16)[None, :]
    weight_at, scales_at, zeros_at, late_at, sums = none(), none(), none(), none(), none()
    for i in tl.static_range(2 * TILES):
        row = tl.minimum(first_rows[i // 2] + i % 2 * 8 + of_eight, last_rows[i // 2]).to(tl.int64)
        weight_at += ((words + row * weight_row)[:, None] + of_tile,)
        scales_at += (scales + row * scales_row,)
        zeros_at += (zeros + row * scales_row,)
    for tile in tl.static_range(TILES):
        late_at += (scales + tl.minimum(first_rows[tile] + of_tile, last_rows[tile]).to(tl.int64) * scales_row,)
    for _ in tl.static_range(TILES * (TOKENS // 8)):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    # A step's operands are loaded during the previous step. Bytes are loaded early in any case: otherwise Triton orders the columns in threads
    # differently.
    its_scales = load_factors(scales_at, 0, columns, BLOCKS, LATE, 0 if LATE else TILES, WARPS)
    its_zeros = load_factors(zeros_at, 0, columns, BLOCKS, LATE, TILES if HAS_ZEROS else 0, WARPS)
    if AHEAD:
        following = load_step(weight_at, late_at, x_at, is_token, 0, columns, BLOCKS, LATE, TOKENS, TILES, WARPS)
    for k in tl.range(0, columns, STEP, num_stages=1):
        if AHEAD:
            step = following
            following = load_step(
                weight_at, late_at, x_at, is_token, k + STEP, columns, BLOCKS, LATE, TOKENS, TILES, WARPS
            )
        else:
            step = load_step(weight_at, late_at, x_at, is_token, k, columns, BLOCKS, LATE, TOKENS, TILES, WARPS)
        next_scales = load_factors(scales_at, k + STEP, columns, BLOCKS, LATE, 0 if LATE else TILES, WARPS)
        next_zeros = load_factors(zeros_at, k + STEP, columns, BLOCKS, LATE, TILES if HAS_ZEROS else 0, WARPS)
        sums = multiply_step(
            sums, step, its_scales, its_zeros, magic, type, FORMAT, HAS_ZEROS, LATE, PAIRWISE, TOKENS, TILES, WARPS
        )
        its_scales, its_zeros = next_scales, next_zeros
    totals = none()
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
    first_rows, last_rows, x_at, is_token = none(), none(), none(), none()
    token_tiles = tl.cdiv(tokens, TOKENS)
    first_token = tl.program_id(0) % token_tiles * TOKENS
    for tile in tl.static_range(TILES):
        first_rows += (tl.program_id(0) // token_tiles * (16 * TILES) + tile * 16,)
        last_rows += (rows - 1,)
    for t in tl.static_range(TOKENS // 8):
        token = first_token + t * 8 + tl.arange(0, WARPS * 8)[:, None] % 8
        x_at += (x + token.to(tl.int64) * x_token,)
        is_token += (token < tokens,)
    totals = multiply_packed(
        x_at, is_token, words, scales, zeros, first_rows, last_rows, magic, columns, weight_row, scales_row, out.dtype.element_ty,
        FORMAT, HAS_ZEROS, BLOCKS, LATE, PAIRWISE, TOKENS, TILES, WARPS, AHEAD,
    )  # fmt: skip
    for tile in tl.static_range(TILES):
        row = first_rows[tile] + tl.arange(0, 16)[:, None]
        for t in tl.static_range(TOKENS // 8):
            token, total = first_token + t * 8 + tl.arange(0, 8)[None, :], totals[tile * (TOKENS // 8) + t]
            if HAS_BIAS:
                total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
            target = out + token.to(tl.int64) * out_token + row
            tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows) & (token < tokens))


@jit
def _unpack(
    words, scales, zeros, out, first, rows, columns, weight_row, scales_row,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Decode rows from `first` on to TYPE, rounded once, in words of four columns [rows, columns / 4]."""
    row_tiles = tl.cdiv(rows, ROWS)
    i = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
    start, row = tl.program_id(0) // row_tiles * WORDS, (first + i).to(tl.int64)
    word, block = start + tl.arange(0, WORDS)[None, :], start // 4 + tl.arange(0, WORDS // 4)[None, :]
    mask, has_block = (i < rows) & (word // 4 * 32 < columns), (i < rows) & (block * 32 < columns)
    codes = tl.load(words + row * weight_row + word, mask=mask, other=0)
    group = row * scales_row + (block // BLOCKS if BLOCKS else block * 0)
    factor = as_fp32(tl.load(scales + group, mask=has_block, other=0), FORMAT)
    centre = tl.full([ROWS, WORDS // 4], 8.0, tl.float32)
    if HAS_ZEROS:
        centre = tl.load(zeros + group, mask=has_block, other=0).to(tl.float32)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, WORDS // 4, 4)), (ROWS, WORDS))
    centre = tl.reshape(tl.broadcast_to(centre[:, :, None], (ROWS, WORDS // 4, 4)), (ROWS, WORDS))
    target = out + i.to(tl.int64) * (columns // 4) + (word // 4 * 8 + word % 4)
    for half in tl.static_range(2):
        four = tl.zeros([ROWS, WORDS], tl.int64)
        for byte in tl.static_range(4):
            code = (codes >> (4 * half + 8 * byte)) & 15
            value = e2m1(code)
            if FORMAT == 2:
                # codes become the last bits of 2^23, since conversions take four times as long
                value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (centre + 8388608.0)
            four |= ((value * factor).to(TYPE).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << (16 * byte)
        tl.store(target + 4 * half, four, mask=mask)


def int4_linear(x: torch.Tensor, weight: "Int4Weight", bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute int4_linear of kernels/matrices/int4.py."""
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    return product(x, weight.operands(), bias)


def mxfp4_linear(x: torch.Tensor, weight: "Mxfp4Weight", bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute mxfp4_linear of kernels/matrices/mxfp4.py."""
    return product(x, weight.operands(), bias)


def product(
    x: torch.Tensor,
    stored: Operands,
    bias: torch.Tensor | None,
    strip: Strip | None = None,
    scratch_bytes: int = linear.SCRATCH_BYTES,
) -> torch.Tensor:
    """Return the product [tokens, rows].

    `strip`: multiply any number of tokens in registers, by programs of this size. `scratch_bytes`: most memory for decoded rows.
    """
    tokens, columns = x.shape
    rows = stored.rows
    is_whole = columns % _BLOCK == 0  # then rows are whole words of the scratch memory
    if x.dtype not in MAGIC or not tokens or not rows or not columns or (tokens > MOST_TOKENS and not is_whole):
        return linear.product(x, stored, bias)
    if strip is None and tokens > most_tokens(rows, columns):
        return linear.through_memory(x, rows, bias, partial(decode_rows, stored), scratch_bytes)
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    strip = strip or strip_for(tokens, rows, num_processors(x.device))
    words = in_words(x)
    _multiply[(triton.cdiv(rows, 16 * strip.tiles) * triton.cdiv(tokens, strip.tokens),)](
        words, stored.weight.view(torch.int32), stored.scales, stored.zeros, out if bias is None else bias, out, MAGIC[x.dtype],
        words.stride(0), rows, tokens, rows, columns, stored.weight_row // 4, stored.scales_row,
        HAS_BIAS=bias is not None, PAIRWISE=x.is_cuda, TOKENS=strip.tokens, TILES=strip.tiles, WARPS=strip.warps, AHEAD=strip.tokens < 32,
        num_warps=strip.warps, maxnreg=REGISTERS[strip.tokens, strip.tiles], **flags(stored),
    )  # fmt: skip
    return out


def most_tokens(rows: int, columns: int) -> int:
    """Return the most rows of x that are multiplied in registers, `MOST_TOKENS` at a time.

    For 64 rows an H100 took 145 us with 28672 x 4096 and 72 with 4096 x 14336, and through memory 206 and 106; but with 4096 x 4096 it took 32, and
    through memory 23.
    """
    return MOST_TOKENS if rows * columns * 2 <= _NEAR_BYTES else 2 * MOST_TOKENS


def strip_for(tokens: int, rows: int, processors: int) -> Strip:
    """Return the strip for a product.

    The number of warps that share rows decides the order in which columns are added, so it does not depend on tokens. With more tokens a strip has
    more rows, because x is read again for each strip.
    """
    padded, is_large = min(MOST_TOKENS, max(8, triton.next_power_of_2(tokens))), rows >= 32 * processors
    return Strip(padded, 2 if padded > 16 or (padded > 8 and is_large) else 1, 4 if is_large else 8)


def decode_rows(stored: Operands, out: torch.Tensor, first: int) -> None:
    """Decode rows from `first` on, with experts stacked, into out [some rows, columns]."""
    rows, columns = out.shape
    _unpack[(triton.cdiv(rows, 8) * triton.cdiv(columns, 1024),)](
        stored.weight.view(torch.int32), stored.scales, stored.zeros, out.view(torch.int64), first, rows, columns,
        stored.weight_row // 4, stored.scales_row,
        FORMAT=stored.format, HAS_ZEROS=stored.has_zeros, BLOCKS=_blocks(stored), TYPE=_TYPES[out.dtype], ROWS=8, WORDS=128, num_warps=4,
    )  # fmt: skip


def _blocks(stored: Operands) -> int:
    """Return the number of blocks of columns that share one scale; 0 if all do."""
    return 0 if stored.column_group > stored.columns else stored.column_group // _BLOCK


def takes(x: torch.Tensor, stored: Operands) -> bool:
    """True if `multiply_packed` takes the weight, and x after `in_words`."""
    return x.dtype in MAGIC and stored.format in (INT4, MXFP4) and stored.columns % _BLOCK == 0


def is_decodable(x: torch.Tensor, stored: Operands) -> bool:
    """True if `decode_rows` takes these experts; their rows must be consecutive in memory."""
    parts = [stored.weight, stored.scales, stored.zeros] if stored.has_zeros else [stored.weight, stored.scales]
    return takes(x, stored) and all(part.is_contiguous() for part in parts)


def flags(stored: Operands) -> dict[str, Any]:
    """Return the constants of a weight for which `multiply_packed` is compiled."""
    blocks = _blocks(stored)
    late = stored.format == INT4 and blocks % 4 == 0
    return {"FORMAT": stored.format, "HAS_ZEROS": stored.has_zeros, "BLOCKS": blocks, "LATE": late}


def in_words(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, columns] as [tokens, words of two columns], in whole blocks."""
    if x.shape[1] % _BLOCK or x.stride(0) % 2 or x.storage_offset() % 2:
        x = F.pad(x, (0, _BLOCK - x.shape[1] % _BLOCK))  # padding by no columns would keep the stride of a single row
    return x.view(torch.int32)
