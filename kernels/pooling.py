"""Of a varlen batch of hidden states, one vector per text: the sum of its tokens, its first or its last, in fp32.

A text may arrive in several pieces, so a mean is a sum here, which its owner divides when the last piece has come. Tokens are added in an order that
the piece alone decides: no other text changes a vector.
"""

from typing import Literal

import torch

from kernels.device import triton_form

Pooled = Literal["sum", "first", "last"]

_triton = triton_form("pooling")


def pool_pieces(hidden: torch.Tensor, starts: torch.Tensor, host_lens: tuple[int, ...], kind: Pooled) -> torch.Tensor:
    """hidden [tokens, size]; starts [pieces + 1] int32, on the device; host_lens: each piece's tokens, at least one -> [pieces, size] fp32"""
    if hidden.is_cuda and _triton is not None:
        return _triton.pool_pieces(hidden, starts, host_lens, kind)
    if kind == "sum":
        pieces = torch.split(hidden, list(host_lens))
        return torch.stack([piece.sum(0, dtype=torch.float32) for piece in pieces])
    rows = starts[:-1] if kind == "first" else starts[1:] - 1
    return hidden.index_select(0, rows).float()
