"""Bias and penalties, one logit entry at a time, with every product and sum rounded as in torch.

A token sampled from the changed logits is therefore the same in both forms.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit

if TYPE_CHECKING:
    from pilotlight.kernels.sampling.penalties import LogitEntries

_BLOCK = 256


_OF_BATCH = ("rows", "tokens", "before", "count")


@jit(of_batch=(*_OF_BATCH, "bias", "seen", "num_outputs", "repetition", "presence", "frequency"))
def _penalize(
    logits, rows, tokens, bias, seen, num_outputs, repetition, presence, frequency, before, row_stride, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    place = tl.load(rows + entry, mask=inside, other=0) * row_stride + tl.load(tokens + entry, mask=inside, other=0)
    logit = tl.load(logits + place, mask=inside, other=0.0)
    tl.store(before + entry, logit, mask=inside)
    biased = logit + tl.load(bias + entry, mask=inside, other=0.0)
    penalty = tl.load(repetition + entry, mask=inside, other=1.0)
    factor = tl.where(biased > 0, tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), penalty), penalty)
    repeated = tl.where(tl.load(seen + entry, mask=inside, other=0.0) > 0, biased * factor, biased)
    outputs = tl.load(num_outputs + entry, mask=inside, other=0.0)
    once = tl.where(outputs > 0, tl.load(presence + entry, mask=inside, other=0.0), 0.0)
    each = tl.load(frequency + entry, mask=inside, other=0.0) * outputs
    tl.store(logits + place, repeated - (each + once), mask=inside)


@jit(of_batch=_OF_BATCH)
def _restore(logits, rows, tokens, before, row_stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    place = tl.load(rows + entry, mask=inside, other=0) * row_stride + tl.load(tokens + entry, mask=inside, other=0)
    tl.store(logits + place, tl.load(before + entry, mask=inside, other=0.0), mask=inside)


def penalize_(logits: torch.Tensor, entries: "LogitEntries") -> torch.Tensor:
    """Compute penalize_ of kernels/sampling/penalties.py."""
    count = len(entries.rows)
    before = torch.empty(count, dtype=logits.dtype, device=logits.device)
    if count:
        _penalize[(triton.cdiv(count, _BLOCK),)](
            logits,
            *(values.contiguous() for values in entries),
            before,
            logits.stride(0),
            count,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return before


def restore_(logits: torch.Tensor, entries: "LogitEntries", before: torch.Tensor) -> None:
    count = len(entries.rows)
    if count:
        _restore[(triton.cdiv(count, _BLOCK),)](
            logits, entries.rows.contiguous(), entries.token_ids.contiguous(), before.contiguous(), logits.stride(0), count,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
