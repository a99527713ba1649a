"""Log probabilities of chosen tokens and of the likeliest alternatives, from raw logits (before temperature and
truncation)."""

import torch

from kernels.device import triton_form

_triton = triton_form("logprobs")


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] fp32, token_ids [rows] -> (chosen [rows], top ids [rows, num_top], top logprobs [rows,
    num_top]); of equal logits any may be named first."""
    if logits.is_cuda and _triton is not None:
        return _triton.token_logprobs(logits, token_ids, num_top)
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser


def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab], token_ids [rows] -> [rows] int64: 1 plus the number of likelier tokens."""
    return (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1) + 1
