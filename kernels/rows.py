"""Rows of a table by their numbers: the embeddings of tokens, the angles of positions.

Knows no token and no position; what the table is of, its owner knows.
"""

import torch
import torch.nn.functional as F

from kernels.cpu import ops


def rows_of(table: torch.Tensor, numbers: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table [rows, size], numbers [n] int64 -> [n, size], times `scale`. A number that the table does not have is the caller's mistake: torch raises,
    where it looks; the C library answers with a row of NaN, which no other row feels."""
    native = ops.rows_of(table, numbers, scale)
    if native is not None:
        return native
    found = F.embedding(numbers, table)
    return found if scale == 1.0 else found * scale
