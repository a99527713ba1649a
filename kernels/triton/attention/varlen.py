"""Search for the sequence of a varlen batch to which a tile of rows belongs, inside a kernel."""

import triton.language as tl

from pilotlight.kernels.triton.jit import jit


@jit
def sequence_of(tile, starts, seqs, rows_per_token, lanes, ROWS: tl.constexpr):
    """Return the sequence of a tile, and the tile's number in it. `lanes`: the numbers 0 to 127.

    Sequence i's tiles are numbered from starts[i] * rows_per_token // ROWS + i on. These numbers leave room for all of its tiles and need no table.
    The last number is below tokens * rows_per_token // ROWS + seqs; a number without a tile lies past the last row of its sequence.
    """
    before = 0
    for first in range(0, seqs, 128):
        seq = first + lanes
        start = tl.load(starts + seq, mask=seq < seqs, other=0).to(tl.int64)
        before += tl.sum(((start * rows_per_token // ROWS + seq <= tile) & (seq < seqs)).to(tl.int32), axis=0)
    seq = before - 1
    return seq, (tile - tl.load(starts + seq).to(tl.int64) * rows_per_token // ROWS - seq).to(tl.int32)
