"""Pooling: one program per piece of a text and slice of its columns.

A piece's tokens are read in tiles, which are added up row by row; the rows of the sum are added at the end.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit

if TYPE_CHECKING:
    from pilotlight.kernels.pooling import Pooled

# columns per program. A single text of 4,096 columns still fills 64 processors, each of which reads 128 bytes of a row.
_COLUMNS = 64
_ROWS = 32


@jit(of_batch=("starts",))
def _pool(hidden, starts, out, token_stride, size, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    begin, end = tl.load(starts + piece), tl.load(starts + piece + 1)
    if KIND == "sum":
        row = tl.arange(0, ROWS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(begin, end, ROWS):
            token = (start + row).to(tl.int64)
            both = (token < end)[:, None] & inside[None, :]
            total += tl.load(hidden + token[:, None] * token_stride + column[None, :], mask=both, other=0.0).to(
                tl.float32
            )
        pooled = tl.sum(total, axis=0)
    else:
        token = begin if KIND == "first" else end - 1
        pooled = tl.load(hidden + token.to(tl.int64) * token_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + piece * size + column, pooled, mask=inside)


def pool_pieces(hidden: torch.Tensor, starts: torch.Tensor, host_lens: tuple[int, ...], kind: "Pooled") -> torch.Tensor:
    """Compute pool_pieces of kernels/pooling.py."""
    pieces, size = len(host_lens), hidden.shape[1]
    out = torch.empty((pieces, size), dtype=torch.float32, device=hidden.device)
    if pieces:
        _pool[(pieces, triton.cdiv(size, _COLUMNS))](
            hidden,
            starts.contiguous(),
            out,
            hidden.stride(0),
            size,
            KIND=kind,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return out
