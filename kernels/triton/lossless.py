"""Products with a weight of 12 bits that are bf16 to the bit (kernels/lossless.py), which is decoded in registers, and the weight itself.

Four words of 32 bits have eight columns: eight places, and twice four low bytes. What a palette of 16 bytes has at four places at a time, and which
bytes belong together, are permutations of bytes, one instruction each on a GPU: 2.1 integer instructions a weight as bf16, 3.1 as fp32. A GPU that
reads 4.8 TB/s has time for 4.6. Escapes are decoded as the first of their palette, which is a number, and what they differ by is added to the sums.
More rows of x are multiplied by cuBLAS, with some rows of the weight at a time that were decoded into memory.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.triton.jit import jit
from kernels.triton.launch import num_processors
from kernels.triton.linear import Tile, sum_parts, through_memory

if TYPE_CHECKING:
    from kernels.lossless import LosslessWeight
    from kernels.weight import GatedActivation

MOST_TOKENS = {torch.bfloat16: 64}  # rows of x that meet a weight in registers; without tensor cores one
_MOST_WIDE_TOKENS = 16  # of other types: registers would not do for more
_SCRATCH_BYTES = 32 << 20  # of decoded rows, which the L2 still has when cuBLAS reads them
_LEAST_GROUPS = 8  # of columns, in a split
_ESCAPES = 32  # looked at together


@jit
def pick_bytes(low, high, selector, PERMUTES: tl.constexpr):
    """Four of the eight bytes of two words: each of the selector's four lowest nibbles, 0 to 7, names one. PTX's prmt, where it `PERMUTES`."""
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
    """Words of eight places, of the low bytes of the first half of a group and of the second one's; p0 to p3: the palette -> four words of two bf16:
    columns 0 and 1, 2 and 3, 64 and 65, 66 and 67 from `word_columns` on."""
    of_eight, is_behind = places & 0x77777777, (places >> 3) & 0x11111111
    front, back = pick_bytes(p0, p1, of_eight, PERMUTES), pick_bytes(p2, p3, of_eight, PERMUTES)
    mask = pick_bytes(places * 0 + 0xFF00, places * 0, is_behind, PERMUTES)
    early = front ^ ((front ^ back) & mask)  # high bytes of columns 0, 64, 1, 65
    front, back = pick_bytes(p0, p1, of_eight >> 16, PERMUTES), pick_bytes(p2, p3, of_eight >> 16, PERMUTES)
    mask = pick_bytes(places * 0 + 0xFF00, places * 0, is_behind >> 16, PERMUTES)
    late = front ^ ((front ^ back) & mask)  # of columns 2, 66, 3, 67
    return (
        pick_bytes(first_low, early, places * 0 + 0x6140, PERMUTES),
        pick_bytes(first_low, late, places * 0 + 0x6342, PERMUTES),
        pick_bytes(second_low, early, places * 0 + 0x7150, PERMUTES),
        pick_bytes(second_low, late, places * 0 + 0x7352, PERMUTES),
    )


@jit
def word_columns(word):
    """The first column of words counted from a group's first on."""
    return word // 16 * 128 + word % 4 // 2 * 32 + word % 16 // 4 * 8 + word % 2 * 4


@jit
def load_words(weight, group, GROUPS: tl.constexpr, columns, WHOLE: tl.constexpr):
    """Places and both halves' low bytes of GROUPS groups from `group` on, [ROWS, GROUPS * 16]; weight [ROWS] pointers to rows. A group of 128 columns
    has 16 words of places, then 16 of low bytes for each half."""
    word = tl.arange(0, GROUPS * 16)
    start = weight[:, None] + (group * 48 + word // 16 * 48 + word % 16)[None, :]
    if WHOLE:
        return tl.load(start), tl.load(start + 16), tl.load(start + 32)
    column = (group * 128 + word // 16 * 128)[None, :]
    is_there, has_second = column < columns, column + 64 < columns
    return (
        tl.load(start, mask=is_there, other=0),
        tl.load(start + 16, mask=is_there, other=0),
        tl.load(start + 32, mask=has_second, other=0),
    )


@jit
def multiply_pair(sums, pair, x, column, columns, WHOLE: tl.constexpr):
    """sums [ROWS, words] plus both of a pair's weights times x at `column` [words] and behind it."""
    first, second = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    if WHOLE:
        x_first, x_second = tl.load(x + column), tl.load(x + column + 1)
    else:
        x_first = tl.load(x + column, mask=column < columns, other=0.0)
        x_second = tl.load(x + column + 1, mask=column + 1 < columns, other=0.0)
    sums += first * x_first.to(tl.float32)[None, :]
    sums += second * x_second.to(tl.float32)[None, :]
    return sums


@jit
def dot_pair(sums, pair, x, is_token, column, columns, ROWS: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """sums [TOKENS, ROWS] plus the products with a word's two columns; column [2 * WORDS] has where both of each are."""
    type = x.dtype.element_ty
    if type == tl.bfloat16:
        first = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        first, second = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    weights = tl.reshape(tl.join(first, second), (ROWS, 2 * WORDS))
    mask = is_token[:, None] if WHOLE else is_token[:, None] & (column < columns)[None, :]
    of_x = tl.load(x[:, None] + column[None, :], mask=mask, other=0.0)
    return tl.dot(of_x, tl.trans(weights), sums, input_precision="ieee")


@jit
def add_escapes(
    sums, x, x_token, tokens, codes, palettes, starts, escapes, first_row, rows, begin, end, row_bytes,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums [TOKENS, ROWS] plus what the escapes in columns begin to end differ by from what was multiplied, times x."""
    group, last = first_row // 8, tl.cdiv(rows, 8)
    at, stop = tl.load(starts + group), tl.load(starts + tl.minimum(group + ROWS // 8, last))
    token, row = tl.arange(0, TOKENS), tl.arange(0, ROWS)
    while at < stop:
        i = at + tl.arange(0, BLOCK)
        escape = tl.load(escapes + i, mask=i < stop, other=0)
        its_group = tl.zeros([BLOCK], tl.int32) + group
        for behind in tl.static_range(1, ROWS // 8):
            its_group += (i >= tl.load(starts + tl.minimum(group + behind, last))).to(tl.int32)
        its_row, column = its_group * 8 + ((escape >> 29) & 7), (escape >> 8) & 0x1FFFFF
        is_mine = (i < stop) & (column >= begin) & (column < end)
        at_low = codes + its_row.to(tl.int64) * row_bytes + low_byte_at(column)
        low = tl.load(at_low, mask=is_mine, other=0).to(tl.int32)
        taken = tl.load(palettes + its_group * 16, mask=is_mine, other=0).to(tl.int32)
        right, wrong = as_fp32(escape & 255, low), as_fp32(taken, low)
        is_row = (its_row[:, None] == (first_row + row)[None, :]) & is_mine[:, None]
        if TOKENS > 1:  # by tensor cores: both are of bf16, which their difference is not
            type = x.dtype.element_ty
            mask = (token < tokens)[:, None] & is_mine[None, :]
            of_x = tl.load(x + token.to(tl.int64)[:, None] * x_token + column[None, :], mask=mask, other=0.0)
            sums = tl.dot(of_x, tl.where(is_row, right[:, None], 0.0).to(type), sums, input_precision="ieee")
            sums = tl.dot(of_x, tl.where(is_row, -wrong[:, None], 0.0).to(type), sums, input_precision="ieee")
        else:
            of_x = tl.load(x + column, mask=is_mine, other=0.0).to(tl.float32)
            sums += tl.sum(tl.where(is_row, ((right - wrong) * of_x)[:, None], 0.0), axis=0)[None, :]
        at += BLOCK
    return sums


@jit
def low_byte_at(column):
    """Where in a row of codes the low byte of a column is."""
    within = column % 64
    return column // 128 * 192 + 64 + column % 128 // 64 * 64 + within % 32 // 8 * 16 + within // 32 * 8 + within % 8


@jit
def as_fp32(high, low):
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@jit(of_batch=("tokens", "splits"))
def _multiply(
    x, words, codes, palette_words, palettes, starts, escapes, bias, out,
    x_token, out_token, out_split, tokens, rows, columns, row_bytes, split_groups, splits,
    HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, WHOLE: tl.constexpr, PERMUTES: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, ESCAPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split, first_row = program % splits, program // splits * ROWS
    row, token = first_row + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    is_row, is_token = row < rows, token < tokens
    # rows behind the last one compute what it does, and are not stored
    its_row = tl.minimum(row, rows - 1).to(tl.int64)
    its_words = words + its_row * (row_bytes // 4)
    its_palette = palette_words + its_row // 8 * 4
    p0, p1 = tl.load(its_palette)[:, None], tl.load(its_palette + 1)[:, None]
    p2, p3 = tl.load(its_palette + 2)[:, None], tl.load(its_palette + 3)[:, None]
    begin = split * split_groups
    end = tl.minimum(begin + split_groups, tl.cdiv(columns, 128))
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    if TOKENS == 1:
        word = word_columns(tl.arange(0, GROUPS * 16))
        parts = tl.zeros([ROWS, GROUPS * 16], tl.float32)
        for group in tl.range(begin, end, GROUPS, num_stages=STAGES):
            places, first_low, second_low = load_words(its_words, group, GROUPS, columns, WHOLE)
            pair0, pair1, pair2, pair3 = decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES)
            column = group * 128 + word
            parts = multiply_pair(parts, pair0, x, column, columns, WHOLE)
            parts = multiply_pair(parts, pair1, x, column + 2, columns, WHOLE)
            parts = multiply_pair(parts, pair2, x, column + 64, columns, WHOLE)
            parts = multiply_pair(parts, pair3, x, column + 66, columns, WHOLE)
        sums += tl.sum(parts, axis=1)[None, :]
    else:
        both = tl.arange(0, GROUPS * 32)
        word = word_columns(both // 2) + both % 2
        its_x = x + token.to(tl.int64) * x_token
        for group in tl.range(begin, end, GROUPS, num_stages=STAGES):
            places, first_low, second_low = load_words(its_words, group, GROUPS, columns, WHOLE)
            pair0, pair1, pair2, pair3 = decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES)
            column = group * 128 + word
            sums = dot_pair(sums, pair0, its_x, is_token, column, columns, ROWS, GROUPS * 16, WHOLE)
            sums = dot_pair(sums, pair1, its_x, is_token, column + 2, columns, ROWS, GROUPS * 16, WHOLE)
            sums = dot_pair(sums, pair2, its_x, is_token, column + 64, columns, ROWS, GROUPS * 16, WHOLE)
            sums = dot_pair(sums, pair3, its_x, is_token, column + 66, columns, ROWS, GROUPS * 16, WHOLE)
    sums = add_escapes(
        sums, x, x_token, tokens, codes, palettes, starts, escapes, first_row, rows, begin * 128, end * 128, row_bytes,
        TOKENS, ROWS, ESCAPES,
    )  # fmt: skip
    if HAS_BIAS and DIRECT:
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    target = out + split.to(tl.int64) * out_split + token.to(tl.int64)[:, None] * out_token + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


@jit(of_batch=("numbers", "n"))
def _decode_rows(
    words, palette_words, numbers, out, scale, n, first, rows, columns, row_words,
    HAS_NUMBERS: tl.constexpr, PERMUTES: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows by number, or all from `first` on: their bits where `out` is of int16, else times `scale`. A number that there is no row of gives NaN."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(numbers + i, mask=i < n, other=0).to(tl.int64) if HAS_NUMBERS else first + i
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    group, byte = tl.program_id(1) * GROUPS, tl.arange(0, GROUPS * 64)
    its_palette = palette_words + row // 8 * 4
    p0, p1 = tl.load(its_palette)[:, None], tl.load(its_palette + 1)[:, None]
    p2, p3 = tl.load(its_palette + 2)[:, None], tl.load(its_palette + 3)[:, None]
    places, first_low, second_low = load_words(words + row * row_words, group, GROUPS, columns, False)
    pair0, pair1, pair2, pair3 = decode(places, first_low, second_low, p0, p1, p2, p3, PERMUTES)
    column = group * 128 + word_columns(byte // 4) + byte % 4
    for half in tl.static_range(2):
        front, back = (pair2, pair3) if half else (pair0, pair1)
        # in order of columns: [ROWS, words, front or back, low or high]
        low, high = tl.join(front << 16, back << 16), tl.join(front & -65536, back & -65536)
        values = tl.reshape(tl.join(low, high), (ROWS, GROUPS * 64))
        values = tl.where(is_row[:, None], values, 0x7FC00000)
        if out.dtype.element_ty == tl.int16:
            values = (values >> 16).to(tl.int16)
        else:
            values = (values.to(tl.float32, bitcast=True) * scale).to(out.dtype.element_ty)
        its_column = column + 64 * half
        mask = (i < n)[:, None] & (its_column < columns)[None, :]
        tl.store(out + i[:, None] * columns + its_column[None, :], values, mask=mask)


@jit(of_batch=("numbers", "n"))
def _put_escapes(
    codes, starts, escapes, numbers, out, scale, n, first, rows, columns, row_bytes, HAS_NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each into its place, in rows that have been decoded."""
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


def lossless_linear(x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute as kernels/lossless.py."""
    tokens = x.shape[0]
    if tokens > MOST_TOKENS.get(x.dtype, _MOST_WIDE_TOKENS):
        return through_memory(x, weight.codes.shape[0], bias, partial(_decode, weight), _SCRATCH_BYTES)
    chosen = tuning.best_lossless_tile(tokens, weight.codes.shape[0], weight.columns, x.device) if x.is_cuda else None
    return product(x, weight, bias) if chosen is None else product(x, weight, bias, tile_of(chosen), chosen.splits)


def lossless_gated_linear(
    x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None, activation: "GatedActivation"
) -> torch.Tensor:
    """Compute as kernels/lossless.py."""
    return activation(lossless_linear(x, weight, bias))


def lossless_logits(hidden: torch.Tensor, weight: "LosslessWeight") -> torch.Tensor:
    """Compute as kernels/lossless.py."""
    return lossless_linear(hidden, weight).float()


def unpack_lossless(codes: torch.Tensor, weight: "LosslessWeight", dtype: torch.dtype) -> torch.Tensor:
    """Compute as kernels/lossless.py."""
    out = torch.empty((codes.shape[0], weight.columns), dtype=dtype, device=codes.device)
    _decode(weight, out)
    return out.view(weight.shape)


def lossless_rows(
    numbers: torch.Tensor, weight: "LosslessWeight", dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Compute as kernels/lossless.py."""
    out = torch.empty((numbers.shape[0], weight.columns), dtype=dtype, device=numbers.device)
    _decode(weight, out, numbers=numbers.contiguous(), scale=scale)
    return out


def product(
    x: torch.Tensor, weight: "LosslessWeight", bias: torch.Tensor | None, tile: Tile | None = None, splits: int = 0
) -> torch.Tensor:
    """[tokens, rows] of few tokens; with a tile and splits given, by these: `tune` tries some."""
    tokens, columns = x.shape
    rows, row_bytes = weight.codes.shape
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = tile or tile_for(tokens, columns, x.dtype)
    programs, groups = triton.cdiv(rows, tile.rows), triton.cdiv(columns, 128)
    splits = splits or _num_splits(programs, groups, x.device)
    split_groups = triton.cdiv(triton.cdiv(groups, splits), tile.half // 64) * (tile.half // 64)
    splits = triton.cdiv(groups, split_groups)
    parts = out if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    _multiply[(programs * splits,)](
        x, weight.codes.view(torch.int32), weight.codes, weight.palettes.view(torch.int32), weight.palettes, weight.starts, weight.escapes,
        out if bias is None else bias, parts, x.stride(0), rows, 0 if splits == 1 else tokens * rows, tokens, rows, columns, row_bytes,
        split_groups, splits,
        HAS_BIAS=bias is not None, DIRECT=splits == 1, WHOLE=columns % (2 * tile.half) == 0, PERMUTES=x.is_cuda,
        TOKENS=tile.tokens, ROWS=tile.rows, GROUPS=tile.half // 64, ESCAPES=_ESCAPES, STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        sum_parts(parts, bias, out)
    return out


def tile_of(chosen: tuning.SplitKTile) -> Tile:
    return Tile(chosen.tokens, chosen.rows, chosen.half, chosen.warps, 3)


def tile_for(tokens: int, columns: int, dtype: torch.dtype) -> Tile:
    """By how many rows x has, and of as many columns as divide the weight's where they do. Without tensor cores fewer words of a row than threads:
    Triton then loads x where it is multiplied, instead of through shared memory with two barriers each."""
    is_wide = dtype == torch.float32 and tokens > 1  # twice the shared memory for x
    groups = 4 if tokens == 1 else 1 if is_wide else 2
    while groups > 1 and columns % (128 * groups):
        groups //= 2
    if tokens == 1:
        return Tile(1, 32, 64 * groups, 4, 3)
    return Tile(max(16, triton.next_power_of_2(tokens)), 64, 64 * groups, 4, 2 if is_wide else 3)


def _num_splits(programs: int, groups: int, device: torch.device) -> int:
    """As kernels/triton/linear.py splits: three programs on every two processors, none with fewer than 1,024 columns."""
    return max(1, min(triton.cdiv(3 * num_processors(device), 2 * programs), groups // _LEAST_GROUPS))


def _decode(
    weight: "LosslessWeight", out: torch.Tensor, first: int = 0, numbers: torch.Tensor | None = None, scale: float = 1.0
) -> None:
    """Rows `numbers`, or those from `first` on, into out [n, columns]."""
    n, columns = out.shape
    if not out.numel():
        return
    rows, row_bytes = weight.codes.shape
    bits = out.view(torch.int16) if out.dtype == torch.bfloat16 and scale == 1.0 else out
    given = weight.starts if numbers is None else numbers
    block = 8 if numbers is None else 1
    _decode_rows[(triton.cdiv(n, block), triton.cdiv(columns, 512))](
        weight.codes.view(torch.int32), weight.palettes.view(torch.int32), given, bits, scale, n, first, rows, columns, row_bytes // 4,
        HAS_NUMBERS=numbers is not None, PERMUTES=out.is_cuda, ROWS=block, GROUPS=4, num_warps=4 if numbers is None else 2,
    )  # fmt: skip
    _put_escapes[(n,)](
        weight.codes, weight.starts, weight.escapes, given, bits, scale, n, first, rows, columns, row_bytes,
        HAS_NUMBERS=numbers is not None, BLOCK=_ESCAPES, num_warps=2,
    )  # fmt: skip
