"""The inner loop of matrix products with a stored weight: rows of x times rows, tile by tile.

This module knows the storage formats, decodes a tile in registers, and is independent of which rows are multiplied or why. A tile of columns has two
halves, as four-bit values are stored: in every block of 32 columns, byte j holds column j in its low half and column j + 16 in its high one, so that
no value moves to another thread. Unpacked weights take consecutive columns, in two halves as well.
"""

import triton.language as tl

from pilotlight.kernels.triton.jit import jit

PLAIN, FP8, INT4, MXFP4 = (tl.constexpr(i) for i in range(4))  # formats from INT4 on are packed


@jit
def half_columns(k, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """Return the columns of the first half of the tile at column k, and the offset of the second half."""
    i = tl.arange(0, HALF)
    columns = k + (i // 16 * 32 + i % 16 if FORMAT >= INT4 else i)
    behind = 16 if FORMAT >= INT4 else HALF
    return columns, behind


@jit
def factors(
    scales, zeros, row, is_row, k, columns, scales_row, row_group, column_group,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Load the scales and zeros for `weights`, as they are stored.

    Scales and zeros are [ROWS, blocks of 32 columns]; for FP8, the scales of both halves are [ROWS]. `row_group` rows and `column_group` columns
    share one scale.
    """
    if FORMAT >= INT4:
        block = k // 32 + tl.arange(0, HALF // 16)
        inside = is_row[:, None] & (block * 32 < columns)[None, :]
        group = row[:, None] * scales_row + (block * 32 // column_group)[None, :]
        scale = tl.load(scales + group, mask=inside, other=0)
        zero = tl.load(zeros + group, mask=inside, other=0) if HAS_ZEROS else 8
    elif FORMAT == FP8:
        # a group is at least as wide as half a tile, and starts where a half starts
        group = scales + row // row_group * scales_row
        scale = tl.load(group + k // column_group, mask=is_row & (k < columns), other=0.0)
        zero = tl.load(group + (k + HALF) // column_group, mask=is_row & (k + HALF < columns), other=0.0)
    else:
        scale, zero = 0, 0
    return scale, zero


@jit
def weights(
    weight, scale, zero, row, is_row, k, columns, weight_row,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Return both halves of weight[row, k : k + 2 * HALF], [ROWS, HALF] each, as numbers of type TYPE."""
    if FORMAT >= INT4:
        block, byte = k // 32 + tl.arange(0, HALF // 16), tl.arange(0, 16)
        inside = is_row[:, None] & (block * 32 < columns)[None, :]
        # [ROWS, blocks, 16]: also the last block of a row is complete in memory
        start = weight + row[:, None] * weight_row + block[None, :] * 16
        codes = tl.load(start[:, :, None] + byte[None, None, :], mask=inside[:, :, None], other=0).to(tl.int32)
        low, high = codes & 15, codes >> 4
        if FORMAT == INT4:
            factor = scale.to(tl.float32)[:, :, None]
            centre = (tl.zeros([ROWS, HALF // 16], tl.int32) + zero)[:, :, None]
            first = (low - centre).to(tl.float32) * factor
            second = (high - centre).to(tl.float32) * factor
        else:
            factor = power_of_two(scale)[:, :, None]
            first, second = e2m1(low) * factor, e2m1(high) * factor
        first, second = tl.reshape(first, (ROWS, HALF)), tl.reshape(second, (ROWS, HALF))
    else:
        column = k + tl.arange(0, HALF)
        start = weight + row[:, None] * weight_row + column[None, :]
        first = tl.load(start, mask=is_row[:, None] & (column < columns)[None, :], other=0)
        second = tl.load(start + HALF, mask=is_row[:, None] & (column + HALF < columns)[None, :], other=0)
        if FORMAT == FP8:
            first = first.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
            second = second.to(tl.float8e4nv, bitcast=True).to(tl.float32) * zero[:, None]
    return first.to(TYPE), second.to(TYPE)


@jit
def e2m1(code):
    """Decode four-bit floats: a sign, two bits of exponent, one of mantissa.

    0 and 0.5 are subnormal.
    """
    magnitude = code & 7
    ordinary = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, ordinary)
    return tl.where(code > 7, -value, value)


@jit
def power_of_two(scale):
    """Decode e8m0, which is the exponent of a float without sign and mantissa."""
    bits = scale.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@jit
def multiply(
    x, is_token, weight, scales, zeros, row, is_row, up_row, begin, end, columns, weight_row, scales_row, row_group, column_group,
    FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return fp32 [TOKENS, ROWS]: rows of x times rows of the weight, over the columns from begin to end.

    x [TOKENS] are pointers to rows; row [ROWS] are the weight's row numbers. If GATED, also return the products with the rows `up_row` rows further.
    """
    type = x.dtype.element_ty
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    up_sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for k in range(begin, end, 2 * HALF):
        column, behind = half_columns(k, FORMAT, HALF)
        x_first = tl.load(x[:, None] + column[None, :], mask=is_token[:, None] & (column < columns)[None, :], other=0.0)
        x_second = tl.load(
            x[:, None] + (column + behind)[None, :],
            mask=is_token[:, None] & (column + behind < columns)[None, :],
            other=0.0,
        )
        scale, zero = factors(
            scales, zeros, row, is_row, k, columns, scales_row, row_group, column_group, FORMAT, HAS_ZEROS, HALF
        )  # fmt: skip
        first, second = weights(weight, scale, zero, row, is_row, k, columns, weight_row, FORMAT, ROWS, HALF, type)
        sums = tl.dot(x_first, tl.trans(first), sums, input_precision="ieee")
        sums = tl.dot(x_second, tl.trans(second), sums, input_precision="ieee")
        if GATED:
            scale, zero = factors(
                scales, zeros, row + up_row, is_row, k, columns, scales_row, row_group, column_group, FORMAT, HAS_ZEROS, HALF
            )  # fmt: skip
            first, second = weights(
                weight, scale, zero, row + up_row, is_row, k, columns, weight_row, FORMAT, ROWS, HALF, type
            )
            up_sums = tl.dot(x_first, tl.trans(first), up_sums, input_precision="ieee")
            up_sums = tl.dot(x_second, tl.trans(second), up_sums, input_precision="ieee")
    return sums, up_sums


@jit
def multiply_few(
    x, x_token, tokens, weight, row, is_row, begin, end, columns, weight_row,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `multiply` for a few rows of x and a plain weight, without tensor cores.

    Tensor cores would first need operands moved to other threads through shared memory. For the same reason products are summed per tile, for one row
    of x after the other: Triton would give a third dimension another layout.
    """
    token = tl.arange(0, TOKENS)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    # stages are set here, because loops without tensor cores prefetch only on request
    for k in tl.range(begin, end, 2 * HALF, num_stages=STAGES):
        column, behind = half_columns(k, 0, HALF)
        first, second = weights(weight, 0, 0, row, is_row, k, columns, weight_row, 0, ROWS, HALF, tl.float32)
        for i in tl.static_range(TOKENS):
            start = x + i * x_token + column
            is_there = i < tokens
            x_first = tl.load(start, mask=is_there & (column < columns), other=0.0).to(tl.float32)
            x_second = tl.load(start + behind, mask=is_there & (column + behind < columns), other=0.0).to(tl.float32)
            its_sums = tl.sum(first * x_first[None, :] + second * x_second[None, :], axis=1)
            sums += tl.where((token == i)[:, None], its_sums[None, :], 0.0)
    return sums
