"""Masks over a vocabulary: one bit for each token, set if a grammar allows it next.

The logits of other tokens become the lowest number, which has no weight in sampling. A row's bits are in 32-bit words, the first token in the lowest
bit, as grammar libraries write them. Tokens after the last word are forbidden.
"""

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import sampling
from pilotlight.kernels.dispatch import operation

LOWEST = torch.finfo(torch.float32).min


def _check(check: ArgumentCheck, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    check.tensor("logits", logits, "rows vocab", (torch.float32,), dense=2)
    check.tensor("rows", rows, "masks", (torch.int64,))
    check.tensor("bits", bits, "masks words", (torch.int32,), dense=2)
    check.indices("rows", rows, logits.shape[0], "the rows of logits")


@operation(_check, triton="sampling.masks", native=sampling.mask_)
def mask_(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Forbid tokens, in place.

    logits [rows, vocab] fp32, contiguous; rows [masks] int64, all different; bits [masks, words] int32.
    """
    vocab = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits.unsqueeze(2) >> places) & 1).bool().flatten(1)[:, :vocab]
    forbidden = torch.ones(len(rows), vocab, dtype=torch.bool, device=logits.device)
    forbidden[:, : allowed.shape[1]] = ~allowed
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, LOWEST))
