"""Log probabilities of chosen tokens and of the likeliest alternatives.

Computed from raw logits: before temperature and truncation.
"""

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation


def _check(check: ArgumentCheck, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int = 0) -> None:
    check.tensor("logits", logits, "rows vocab", (torch.float32,))
    check.require("logits", logits.shape[1] > 0, "has no entry to choose from")
    check.tensor("token_ids", token_ids, "rows", (torch.int64,))
    check.require("num_top", num_top >= 0, f"is {num_top}")
    check.indices("token_ids", token_ids, logits.shape[1], "the vocabulary")


@operation(_check, triton="sampling.logprobs")
def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log probabilities: chosen [rows], and top ids and top values [rows, num_top].

    logits [rows, vocab] fp32, token_ids [rows], the chosen tokens. The order of equal logits is unspecified.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser


@operation(_check)
def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return ranks [rows], 1 for the likeliest token, for logits [rows, vocab] and token_ids [rows]."""
    return (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1) + 1
