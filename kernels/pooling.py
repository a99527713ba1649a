"""Pooling of a varlen batch of hidden states: each text's sum, first or last token, in fp32.

A text may arrive in several pieces, so this module returns sums, and the caller divides them for a mean after the last piece. The order in which
tokens are added depends only on the piece: no other text changes a vector.
"""

from typing import Literal

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation

Pooled = Literal["sum", "first", "last"]


def _check(
    check: ArgumentCheck, hidden: torch.Tensor, starts: torch.Tensor, host_lens: tuple[int, ...], kind: Pooled
) -> None:
    check.tensor("hidden", hidden, "tokens size", dense=1)
    check.derive("starts", len(host_lens) + 1, "host_lens, with one more,")
    check.tensor("starts", starts, "starts", (torch.int32,))
    check.require("host_lens", min(host_lens, default=1) > 0, "holds a piece without tokens, which has no vector")
    tokens = f"add up to {sum(host_lens)}, and hidden has {len(hidden)} tokens"
    check.require("host_lens", sum(host_lens) == len(hidden), tokens)
    check.require("kind", kind in ("sum", "first", "last"), f"is {kind!r}, wanted sum, first or last")


@operation(_check, triton="pooling")
def pool_pieces(hidden: torch.Tensor, starts: torch.Tensor, host_lens: tuple[int, ...], kind: Pooled) -> torch.Tensor:
    """Return one vector per piece, [pieces, size] fp32.

    hidden [tokens, size]; starts [pieces + 1] int32, on the device; host_lens: the tokens of each piece, at least one.
    """
    if not host_lens:
        return hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
    if kind == "sum":
        pieces = torch.split(hidden, list(host_lens))
        return torch.stack([piece.sum(0, dtype=torch.float32) for piece in pieces])
    rows = starts[:-1] if kind == "first" else starts[1:] - 1
    return hidden.index_select(0, rows).float()
