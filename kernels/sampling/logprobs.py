"""Log probabilities of chosen tokens and of the likeliest alternatives.

Computed from raw logits: before temperature and truncation.
"""

import torch

from pilotlight.kernels import checks
from pilotlight.kernels.checks import ArgumentCheck, check_indices, placed
from pilotlight.kernels.dispatch import operation


def _check(operation: str, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int = 0) -> None:
    if not (
        logits.dim() == 2
        and logits.shape[1]
        and logits.dtype == torch.float32
        and token_ids.shape == logits.shape[:1]
        and token_ids.dtype == torch.int64
        and num_top >= 0
        and placed(logits, token_ids)
    ):
        check = ArgumentCheck(operation)
        check.tensor("logits", logits, "rows vocab", (torch.float32,))
        check.require("logits", logits.shape[1] > 0, "has no entry to choose from")
        check.tensor("token_ids", token_ids, "rows", (torch.int64,))
        check.require("num_top", num_top >= 0, f"is {num_top}")
    if checks.DEBUG:
        check_indices(operation, "token_ids", token_ids, logits.shape[1], "the vocabulary")


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
