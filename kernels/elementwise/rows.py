"""Rows of a table by their numbers: the embeddings of tokens, the angles of positions.

Knows no token and no position; what the table is of, its owner knows.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import FLOATS, INDICES, ArgumentCheck, placed
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


def _check(operation: str, table: torch.Tensor, numbers: torch.Tensor, scale: float = 1.0) -> None:
    if not (
        table.ndim == 2
        and numbers.ndim == 1
        and table.dtype in FLOATS
        and numbers.dtype in INDICES
        and placed(table, numbers)
    ):
        check = ArgumentCheck(operation)
        check.tensor("table", table, "rows size")
        check.tensor("numbers", numbers, "n", INDICES)


@operation(_check, native=ops.rows_of)
def rows_of(table: torch.Tensor, numbers: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table [rows, size], numbers [n] int64 -> [n, size], times `scale`. A number that the table does not have is the caller's mistake: torch raises,
    where it looks; the C library answers with a row of NaN, which no other row feels."""
    found = F.embedding(numbers, table)
    return found if scale == 1.0 else found * scale
