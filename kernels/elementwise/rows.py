"""Rows of a table by number: the embeddings of tokens, the angles of positions.

This module is independent of what the table contains.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import INDICES, ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation


def _check(check: ArgumentCheck, table: torch.Tensor, numbers: torch.Tensor, scale: float = 1.0) -> None:
    check.tensor("table", table, "rows size")
    check.tensor("numbers", numbers, "n", INDICES)


@operation(_check, native=ops.rows_of, guards_itself=True)
def rows_of(table: torch.Tensor, numbers: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the rows `numbers` [n] int64 of table [rows, size], times `scale`, as [n, size].

    A number outside the table is an error of the caller: torch raises if it checks, and the C library returns a row of NaN.
    """
    found = F.embedding(numbers, table)
    return found if scale == 1.0 else found * scale
