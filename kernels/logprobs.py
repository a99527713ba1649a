"""Log probabilities of chosen tokens and of the likeliest alternatives, from raw logits (before temperature and
truncation)."""

import torch

from kernels import checks
from kernels.checks import Call, check_indices, placed
from kernels.device import triton_form

_triton = triton_form("logprobs")


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [rows, vocab] fp32, token_ids [rows] -> (chosen [rows], top ids [rows, num_top], top logprobs [rows,
    num_top]); of equal logits any may be named first."""
    _check("token_logprobs", logits, token_ids)
    if num_top < 0:
        Call("token_logprobs").require("num_top", False, f"is {num_top}")
    if logits.is_cuda and _triton is not None:
        return _triton.token_logprobs(logits, token_ids, num_top)
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser


def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab], token_ids [rows] -> [rows] int64: 1 plus the number of likelier tokens."""
    _check("token_ranks", logits, token_ids)
    return (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(dim=-1) + 1


def _check(operation: str, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    if not (
        logits.dim() == 2
        and logits.shape[1]
        and logits.dtype == torch.float32
        and token_ids.shape == logits.shape[:1]
        and token_ids.dtype == torch.int64
        and placed(logits, token_ids)
    ):
        call = Call(operation)
        call.tensor("logits", logits, "rows vocab", (torch.float32,))
        call.require("logits", logits.shape[1] > 0, "has no entry to choose from")
        call.tensor("token_ids", token_ids, "rows", (torch.int64,))
    if checks.DEBUG:
        check_indices(operation, "token_ids", token_ids, logits.shape[1], "the vocabulary")
