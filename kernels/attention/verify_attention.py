"""Paged attention of each sequence's last few tokens, to verify drafts in one pass over the cache.

It is decode attention with more rows: on a CPU the result has the same bits as decoding one token after the other.
"""

from functools import partial
from typing import Any

import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.prefill_attention import check
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.dispatch import operation

_check = partial(check, sees_ahead=False)


def _native(library: Library, *args: Any) -> torch.Tensor | None:
    _check("verify_attention", *args)
    return ops.verify_attention(library, *args)


@operation(_check, triton="attention.verify_attention", native=_native)
def verify_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: VarlenBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attend from the last few tokens of each sequence; return [tokens, heads, head_dim].

    q [tokens, heads, head_dim]. Keys and values of the tokens are already written. Other arguments are as in prefill_attention.
    """
    return attend_by_torch(q, k_cache, v_cache, batch, rule)
