"""Products with 12-bit weights that equal bf16 to the bit (kernels/matrices/lossless.py).

Weights are decoded in the registers that tensor cores multiply. Three words of 32 bits hold eight columns: eight palette indices, and twice four low
bytes. A look-up of four indices in a palette of 16 bytes, and the joining of bytes, are permutations of bytes, which are single instructions on a
GPU. In total a weight takes 4.8 instructions; an H100 that reads 3 TB/s has time for 14. As in kernels/triton/matrices/packed.py, warps take columns
in turns, and a thread multiplies them in the order in which it holds them: of 128 columns of a row four threads have 32 each, in four runs of eight.
Escapes are decoded with the first high byte of their palette, which makes them finite. At the end x times their differences from these values is
added, one escape per thread. For more rows of x, and types other than bf16, cuBLAS multiplies, and rows of the weight are decoded into memory, some
at a time.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.matrices.linear import SCRATCH_BYTES, through_memory
from pilotlight.kernels.triton.matrices.packed import (
    Strip,
    halves,
    in_words,
    most_tokens,
    none,
    weight_operand,
    x_operand,
)

if TYPE_CHECKING:
    from pilotlight.kernels.matrices.lossless import LosslessWeight
    from pilotlight.kernels.matrices.weight import GatedActivation

_WARPS = 4  # warps that share rows of a weight
_REGISTERS = {8: 128, 16: 160, 32: 255}  # registers that a thread may use, by number of tokens
_WORDS, _ESCAPES = 128, 128  # per row: words that are decoded together, and escapes that are examined together


@jit
def pick_bytes(low, high, selector, PERMUTES: tl.constexpr):
    """Pick four of the eight bytes of two words, by the four lowest nibbles (0 to 7) of the selector.

    Uses PTX's prmt if `PERMUTES`.
    """
    if PERMUTES:
        picked = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bytes = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        wide = (bytes >> (selector & 7) * 8) & 255
        for i in tl.static_range(1, 4):
            wide |= ((bytes >> ((selector >> 4 * i) & 7) * 8) & 255) << 8 * i
        picked = wide.to(tl.int32)
    return picked


@jit
def decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES: tl.constexpr):
    """Decode words to four words of two bf16 each.

    `places`: eight palette indices; first_low, second_low: low bytes of the first and second half of a group; p0 to p3: the palette. The result is
    columns 0 and 1, 2 and 3, 64 and 65, 66 and 67 from `word_columns` on.
    """
    of_eight, is_behind = places & 0x77777777, (places >> 3) & 0x11111111
    front, back = pick_bytes(p0, p1, of_eight, PERMUTES), pick_bytes(p2, p3, of_eight, PERMUTES)
    mask = pick_bytes(places * 0 + 0xFF00, places * 0, is_behind, PERMUTES)
    early = front ^ ((front ^ back) & mask)  # high bytes of columns 0, 64, 1, 65
    front, back = pick_bytes(p0, p1, of_eight >> 16, PERMUTES), pick_bytes(p2, p3, of_eight >> 16, PERMUTES)
    mask = pick_bytes(places * 0 + 0xFF00, places * 0, is_behind >> 16, PERMUTES)
    late = front ^ ((front ^ back) & mask)  # high bytes of columns 2, 66, 3, 67
    return (
        pick_bytes(first_low, early, places * 0 + 0x6140, PERMUTES),
        pick_bytes(first_low, late, places * 0 + 0x6342, PERMUTES),
        pick_bytes(second_low, early, places * 0 + 0x7150, PERMUTES),
        pick_bytes(second_low, late, places * 0 + 0x7352, PERMUTES),
    )


@jit
def word_columns(word):
    """Return the first column of each word; `word` is counted from the start of a group."""
    return word // 16 * 128 + word % 4 // 2 * 32 + word % 16 // 4 * 8 + word % 2 * 4


@jit
def load_words(at, is_there, has_second):
    """Load palette indices and both halves' low bytes of groups of 128 columns, 16 words of each.

    They are evicted first, because they are read once, and the first-level cache should keep x, which strips share.
    """
    return (
        tl.load(at, mask=is_there, other=0, eviction_policy="evict_first"),
        tl.load(at + 16, mask=is_there, other=0, eviction_policy="evict_first"),
        tl.load(at + 32, mask=has_second, other=0, eviction_policy="evict_first"),
    )


@jit
def low_byte_at(column):
    """Return the position of a column's low byte in a row of codes."""
    within = column % 64
    return column // 128 * 192 + 64 + column % 128 // 64 * 64 + within % 32 // 8 * 16 + within // 32 * 8 + within % 8


@jit
def as_fp32(high, low):
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@jit
def load_step(
    weight_at, x_at, is_token, group, columns, x_words, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load what one step multiplies: 128 columns per warp from `group` on.

    For every eight rows: palette indices and both halves' low bytes; for every eight tokens: four runs of 32 columns.
    """
    its_group, word = (group + tl.arange(0, WARPS * 8) // 8)[:, None], tl.arange(0, 16)[None, :]
    is_there, has_second = its_group * 128 < columns, its_group * 128 + 64 < columns
    words, of_x = none(), none()
    for i in tl.static_range(2 * TILES):
        words += load_words(weight_at[i] + its_group * 48, is_there, has_second)
    for t in tl.static_range(TOKENS // 8):
        for run in tl.static_range(4):
            at = its_group * 64 + run * 16 + word
            of_x += (tl.load(x_at[t] + at, mask=is_token[t] & (at < x_words), other=0),)
    return words, of_x


@jit
def x_operands(run0, run1, run2, run3, type: tl.constexpr, WARPS: tl.constexpr):
    """Arrange runs of columns of eight tokens as the factors of a word's four pairs, [WARPS, 32, 8]."""
    even0, odd0 = tl.split(tl.reshape(run0, (WARPS * 8, 8, 2)))
    even1, odd1 = tl.split(tl.reshape(run1, (WARPS * 8, 8, 2)))
    even2, odd2 = tl.split(tl.reshape(run2, (WARPS * 8, 8, 2)))
    even3, odd3 = tl.split(tl.reshape(run3, (WARPS * 8, 8, 2)))
    return (
        x_operand(even0, even1, type, WARPS), x_operand(odd0, odd1, type, WARPS),
        x_operand(even2, even3, type, WARPS), x_operand(odd2, odd3, type, WARPS),
    )  # fmt: skip


@jit
def multiply_step(
    sums, step, palette, type: tl.constexpr, PERMUTES: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return sums plus the product of a step's loaded operands."""
    words, of_x = step
    x_parts, added = none(), none()
    for t in tl.static_range(TOKENS // 8):
        x_parts += x_operands(of_x[4 * t], of_x[4 * t + 1], of_x[4 * t + 2], of_x[4 * t + 3], type, WARPS)
    for tile in tl.static_range(TILES):
        upper = decode(
            words[6 * tile], words[6 * tile + 1], words[6 * tile + 2],
            palette[8 * tile], palette[8 * tile + 1], palette[8 * tile + 2], palette[8 * tile + 3], PERMUTES,
        )  # fmt: skip
        lower = decode(
            words[6 * tile + 3], words[6 * tile + 4], words[6 * tile + 5],
            palette[8 * tile + 4], palette[8 * tile + 5], palette[8 * tile + 6], palette[8 * tile + 7], PERMUTES,
        )  # fmt: skip
        products = none()
        for t in tl.static_range(TOKENS // 8):
            products += (sums[tile * (TOKENS // 8) + t],)
        for pair in tl.static_range(4):
            low0, high0 = halves(upper[pair], type)
            low1, high1 = halves(lower[pair], type)
            weights, more = weight_operand(low0, high0, low1, high1, WARPS), none()
            for t in tl.static_range(TOKENS // 8):
                more += (tl.dot(weights, x_parts[4 * t + pair], products[t]),)
            products = more
        added += products
    return added


@jit
def add_escapes(
    sums, escape, x, codes, escapes, first_row, row_bytes, x_token, first_token, tokens, start, middle, stop, upper, lower,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return sums of a tile of 16 rows, corrected for its escapes from `start` to `stop`.

    Adds, for every eight tokens, x times the difference between an escape and the value that was multiplied in its place. `escape`: the first of
    these escapes, loaded, one per thread. Escapes from `middle` on belong to the lower eight rows. `upper`, `lower`: the high bytes decoded in place
    of escapes.
    """
    type: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    for at in tl.range(start, stop, WARPS * 32, num_stages=1):
        is_lower = at + lane >= middle
        row, column = is_lower.to(tl.int32) * 8 + ((escape >> 29) & 7), (escape >> 8) & 0x1FFFFF
        is_mine = at + lane < stop
        low = tl.load(codes + (first_row + row).to(tl.int64) * row_bytes + low_byte_at(column), mask=is_mine, other=0)
        low = low.to(tl.int32)
        right = (((escape & 255) << 8) | low).to(tl.int16).to(type, bitcast=True)
        wrong = (tl.where(is_lower, lower, upper) << 8) | low
        less = (wrong ^ 0x8000).to(tl.int16).to(type, bitcast=True)
        is_row = (row[:, None, :] == tl.arange(0, 16)[None, :, None]) & is_mine[:, None, :]
        # right and less are exact in bf16; their difference might not be
        rights = tl.where(is_row, right[:, None, :], 0.0).to(type)
        lesses, more = tl.where(is_row, less[:, None, :], 0.0).to(type), none()
        for t in tl.static_range(TOKENS // 8):
            token = first_token + t * 8 + tl.arange(0, 8)[None, None, :]
            mask = is_mine[:, :, None] & (token < tokens)
            of_x = tl.load(x + token.to(tl.int64) * x_token + column[:, :, None], mask=mask, other=0.0)
            more += (tl.dot(lesses, of_x, tl.dot(rights, of_x, sums[t])),)
        sums = more
        following = at + WARPS * 32 + lane
        escape = tl.load(escapes + following, mask=following < stop, other=0)
    return sums


@jit(of_batch=("tokens",))
def _multiply(
    x, x_words, words, codes, palette_words, starts, escapes, bias, out,
    x_token, x_words_token, out_token, tokens, rows, columns, num_x_words, row_words,
    HAS_BIAS: tl.constexpr, PERMUTES: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Multiply x, passed plain and in words of two columns, by the weight."""
    type: tl.constexpr = x.dtype.element_ty
    token_tiles = tl.cdiv(tokens, TOKENS)
    first, first_token = tl.program_id(0) // token_tiles * (16 * TILES), tl.program_id(0) % token_tiles * TOKENS
    of_eight, lane = tl.arange(0, WARPS * 8) % 8, tl.arange(0, WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    weight_at, palette, bounds, first_escapes = none(), none(), none(), none()
    x_at, is_token, sums = none(), none(), none()
    for i in tl.static_range(2 * TILES + 1):
        bounds += (tl.load(starts + tl.minimum(first // 8 + i, tl.cdiv(rows, 8))),)
    for i in tl.static_range(2 * TILES):
        # rows past the last repeat it and are not stored
        row = tl.minimum(first + i * 8 + of_eight, rows - 1).to(tl.int64)
        weight_at += ((words + row * row_words)[:, None] + tl.arange(0, 16)[None, :],)
        at = palette_words + tl.minimum(first // 8 + i, (rows - 1) // 8) * 4
        palette += (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    for tile in tl.static_range(TILES):  # these are loaded early, since they are needed right after the columns
        i = bounds[2 * tile] + lane
        first_escapes += (tl.load(escapes + i, mask=i < bounds[2 * tile + 2], other=0),)
    for t in tl.static_range(TOKENS // 8):
        token = first_token + t * 8 + of_eight[:, None]
        x_at += (x_words + token.to(tl.int64) * x_words_token,)
        is_token += (token < tokens,)
    for _ in tl.static_range(TILES * (TOKENS // 8)):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    groups = tl.cdiv(columns, 128)
    if AHEAD:
        following = load_step(weight_at, x_at, is_token, 0, columns, num_x_words, TOKENS, TILES, WARPS)
    for group in tl.range(0, groups, WARPS, num_stages=1):
        if AHEAD:
            step = following
            following = load_step(weight_at, x_at, is_token, group + WARPS, columns, num_x_words, TOKENS, TILES, WARPS)
        else:
            step = load_step(weight_at, x_at, is_token, group, columns, num_x_words, TOKENS, TILES, WARPS)
        sums = multiply_step(sums, step, palette, type, PERMUTES, TOKENS, TILES, WARPS)
    for tile in tl.static_range(TILES):
        its_sums = none()
        for t in tl.static_range(TOKENS // 8):
            its_sums += (sums[tile * (TOKENS // 8) + t],)
        its_sums = add_escapes(
            its_sums, first_escapes[tile], x, codes, escapes, first + tile * 16, row_words * 4, x_token, first_token, tokens,
            bounds[2 * tile], bounds[2 * tile + 1], bounds[2 * tile + 2], palette[8 * tile] & 255, palette[8 * tile + 4] & 255,
            TOKENS, WARPS,
        )  # fmt: skip
        row = first + tile * 16 + tl.arange(0, 16)[:, None]
        for t in tl.static_range(TOKENS // 8):
            total, token = tl.sum(its_sums[t], axis=0), first_token + t * 8 + tl.arange(0, 8)[None, :]
            if HAS_BIAS:
                total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
            target = out + token.to(tl.int64) * out_token + row
            tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows) & (token < tokens))


@jit(of_batch=("first", "rows"))
def _unpack(
    words, codes, palette_words, starts, escapes, out, out_bits, first, rows, columns, row_words,
    PERMUTES: tl.constexpr, WORDS: tl.constexpr, ESCAPES: tl.constexpr,
):  # fmt: skip
    """Unpack rows from `first` on, a multiple of 8, with a number of columns that 64 divides.

    `out` is passed twice, in words of four columns and as single values. A program has the rows of one palette, and writes the escapes among its
    columns.
    """
    row_tiles = tl.cdiv(rows, 8)
    begin, chunk = tl.program_id(0) % row_tiles * 8, tl.program_id(0) // row_tiles * WORDS
    palette, group = palette_words + (first + begin) // 8 * 4, (first + begin) // 8
    at, stop = tl.load(starts + group), tl.load(starts + group + 1)
    escape = tl.load(escapes + at + tl.arange(0, ESCAPES), mask=tl.arange(0, ESCAPES) < stop - at, other=0)
    i, word = (begin + tl.arange(0, 8)).to(tl.int64)[:, None], tl.arange(0, WORDS)[None, :]
    column = chunk * 8 + word // 16 * 128
    is_there, has_second = (i < rows) & (column < columns), (i < rows) & (column + 64 < columns)
    weight_at = words + (first + i) * row_words + chunk * 3 + (word // 16 * 48 + word % 16)
    places, first_low, second_low = load_words(weight_at, is_there, has_second)
    p0, p1, p2, p3 = tl.load(palette), tl.load(palette + 1), tl.load(palette + 2), tl.load(palette + 3)
    pair0, pair1, pair2, pair3 = decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES)
    target = out + i * (columns // 4) + chunk * 2 + (word // 16 * 32 + word // 2 % 2 * 8 + word // 4 % 4 * 2 + word % 2)
    tl.store(target, (pair0.to(tl.int64) & 0xFFFFFFFF) | (pair1.to(tl.int64) << 32), mask=is_there)
    tl.store(target + 16, (pair2.to(tl.int64) & 0xFFFFFFFF) | (pair3.to(tl.int64) << 32), mask=has_second)
    tl.debug_barrier()  # escapes overwrite values that other threads have written
    for start in tl.range(at, stop, ESCAPES, num_stages=1):
        row, its_column = begin + ((escape >> 29) & 7), (escape >> 8) & 0x1FFFFF
        is_mine = start + tl.arange(0, ESCAPES) < stop
        is_mine = is_mine & (its_column >= chunk * 8) & (its_column < chunk * 8 + WORDS * 8) & (row < rows)
        at_low = codes + (first + row).to(tl.int64) * (row_words * 4) + low_byte_at(its_column)
        low = tl.load(at_low, mask=is_mine, other=0).to(tl.int32)
        tl.store(
            out_bits + row.to(tl.int64) * columns + its_column, (((escape & 255) << 8) | low).to(tl.int16), mask=is_mine
        )
        following = start + ESCAPES + tl.arange(0, ESCAPES)
        escape = tl.load(escapes + following, mask=following < stop, other=0)


@jit(of_batch=("numbers",))
def _decode_rows(
    words, palette_words, numbers, out, scale, first, rows, columns, row_words,
    HAS_NUMBERS: tl.constexpr, PERMUTES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Decode the rows `numbers`, or those from `first` on.

    Writes their bits if `out` is int16, else their values times `scale`. A number outside the table gives NaN.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(numbers + i).to(tl.int64) if HAS_NUMBERS else first + i
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    begin, word, byte = tl.program_id(1) * (GROUPS * 128), tl.arange(0, GROUPS * 16), tl.arange(0, GROUPS * 64)
    palette, group_column = palette_words + row // 8 * 4, begin + word // 16 * 128
    weight_at = words + row * row_words + begin // 128 * 48 + (word // 16 * 48 + word % 16)
    places, first_low, second_low = load_words(weight_at, group_column < columns, group_column + 64 < columns)
    p0, p1, p2, p3 = tl.load(palette), tl.load(palette + 1), tl.load(palette + 2), tl.load(palette + 3)
    pair0, pair1, pair2, pair3 = decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES)
    column = begin + word_columns(byte // 4) + byte % 4
    for half in tl.static_range(2):
        front, back = (pair2, pair3) if half else (pair0, pair1)
        # the columns of a group in order: [words, front or back, low or high]
        low, high = tl.join(front << 16, back << 16), tl.join(front & -65536, back & -65536)
        values = tl.where(is_row, tl.reshape(tl.join(low, high), (GROUPS * 64,)), 0x7FC00000)
        if out.dtype.element_ty == tl.int16:
            values = (values >> 16).to(tl.int16)
        else:
            values = (values.to(tl.float32, bitcast=True) * scale).to(out.dtype.element_ty)
        tl.store(out + i * columns + column + 64 * half, values, mask=column + 64 * half < columns)


@jit(of_batch=("numbers",))
def _put_escapes(
    codes, starts, escapes, numbers, out, scale, first, rows, columns, row_bytes, HAS_NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each escape to its place in decoded rows."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(numbers + i).to(tl.int64) if HAS_NUMBERS else first + i
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    at, stop = tl.load(starts + row // 8), tl.load(starts + row // 8 + 1)
    while at < stop:
        its = at + tl.arange(0, BLOCK)
        escape = tl.load(escapes + its, mask=its < stop, other=0)
        column = (escape >> 8) & 0x1FFFFF
        is_mine = is_row & (its < stop) & (((escape >> 29) & 7) == row % 8)
        low = tl.load(codes + row * row_bytes + low_byte_at(column), mask=is_mine, other=0).to(tl.int32)
        if out.dtype.element_ty == tl.int16:
            value = (((escape & 255) << 8) | low).to(tl.int16)
        else:
            value = (as_fp32(escape & 255, low) * scale).to(out.dtype.element_ty)
        tl.store(out + i * columns + column, value, mask=is_mine)
        at += BLOCK


def lossless_linear(
    x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None = None, scratch_bytes: int = SCRATCH_BYTES
) -> torch.Tensor:
    """Compute lossless_linear of kernels/matrices/lossless.py."""
    rows = weight.codes.shape[0]
    if x.dtype == torch.bfloat16 and x.shape[0] <= most_tokens(rows, weight.columns):
        return product(x, weight, bias)
    return through_memory(x, rows, bias, partial(_decode, weight), scratch_bytes)


def lossless_gated_linear(
    x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None, activation: "GatedActivation"
) -> torch.Tensor:
    """Compute lossless_gated_linear of kernels/matrices/lossless.py."""
    return activation(lossless_linear(x, weight, bias))


def lossless_logits(hidden: torch.Tensor, weight: "LosslessWeight") -> torch.Tensor:
    """Compute lossless_logits of kernels/matrices/lossless.py."""
    return lossless_linear(hidden, weight).float()


def unpack_lossless(codes: torch.Tensor, weight: "LosslessWeight", dtype: torch.dtype) -> torch.Tensor:
    """Compute unpack_lossless of kernels/matrices/lossless.py."""
    out = torch.empty((codes.shape[0], weight.columns), dtype=dtype, device=codes.device)
    _decode(weight, out)
    return out.view(weight.shape)


def lossless_rows(
    numbers: torch.Tensor, weight: "LosslessWeight", dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Compute lossless_rows of kernels/matrices/lossless.py."""
    out = torch.empty((numbers.shape[0], weight.columns), dtype=dtype, device=numbers.device)
    _decode(weight, out, numbers=numbers.contiguous(), scale=scale)
    return out


def product(
    x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None, strip: Strip | None = None
) -> torch.Tensor:
    """Return the product [tokens, rows] for few tokens in bf16. `strip` overrides the default in tests."""
    tokens, columns = x.shape
    rows, row_bytes = weight.codes.shape
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x_words = in_words(x)
    strip = strip or strip_for(tokens)
    _multiply[(triton.cdiv(rows, 16 * strip.tiles) * triton.cdiv(tokens, strip.tokens),)](
        x, x_words, weight.codes.view(torch.int32), weight.codes, weight.palettes.view(torch.int32), weight.starts, weight.escapes,
        out if bias is None else bias, out, x.stride(0), x_words.stride(0), rows, tokens, rows, columns,
        triton.cdiv(columns, 2), row_bytes // 4,
        HAS_BIAS=bias is not None, PERMUTES=x.is_cuda, TOKENS=strip.tokens, TILES=strip.tiles, WARPS=strip.warps, AHEAD=strip.tokens < 32,
        num_warps=strip.warps, maxnreg=_REGISTERS[strip.tokens],
    )  # fmt: skip
    return out


def strip_for(tokens: int) -> Strip:
    """Return the strip for so many tokens.

    The number of warps that share rows does not depend on tokens (as in packed.py): a row of x has the same bits in any batch.
    """
    return Strip(min(32, max(8, triton.next_power_of_2(tokens))), 1 if tokens <= 16 else 2, _WARPS)


def _decode(
    weight: "LosslessWeight", out: torch.Tensor, first: int = 0, numbers: torch.Tensor | None = None, scale: float = 1.0
) -> None:
    """Decode rows `numbers`, or those from `first` on, into out [n, columns]."""
    n, columns = out.shape
    if not out.numel():
        return
    rows, row_bytes = weight.codes.shape
    words, palette_words = weight.codes.view(torch.int32), weight.palettes.view(torch.int32)
    bits = out.view(torch.int16) if out.dtype == torch.bfloat16 and scale == 1.0 else out
    if numbers is None and bits is not out and columns % 64 == 0 and first % 8 == 0:
        _unpack[(triton.cdiv(n, 8) * triton.cdiv(columns, 8 * _WORDS),)](
            words, weight.codes, palette_words, weight.starts, weight.escapes, out.view(torch.int64), bits, first, n, columns, row_bytes // 4,
            PERMUTES=out.is_cuda, WORDS=_WORDS, ESCAPES=_ESCAPES, num_warps=4,
        )  # fmt: skip
        return
    given = weight.starts if numbers is None else numbers
    _decode_rows[(n, triton.cdiv(columns, 512))](
        words, palette_words, given, bits, scale, first, rows, columns, row_bytes // 4,
        HAS_NUMBERS=numbers is not None, PERMUTES=out.is_cuda, GROUPS=4, num_warps=2,
    )  # fmt: skip
    _put_escapes[(n,)](
        weight.codes, weight.starts, weight.escapes, given, bits, scale, first, rows, columns, row_bytes,
        HAS_NUMBERS=numbers is not None, BLOCK=32, num_warps=2,
    )  # fmt: skip
