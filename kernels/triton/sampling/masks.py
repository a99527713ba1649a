"""Masks over a vocabulary, a block of logits at a time."""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit

_BLOCK = 1024
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@jit(of_batch=("rows", "bits", "vocab", "words"))
def _mask(logits, rows, bits, vocab, words, BLOCK: tl.constexpr):
    mask = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + mask * words + token // 32, mask=token // 32 < words, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    place = tl.load(rows + mask) * vocab + token
    tl.store(logits + place, tl.full([BLOCK], LOWEST, tl.float32), mask=forbidden & (token < vocab))


def mask_(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Compute mask_ of kernels/sampling/masks.py."""
    masks, words = bits.shape
    vocab = logits.shape[1]
    if masks:
        _mask[(masks, triton.cdiv(vocab, _BLOCK))](
            logits, rows.contiguous(), bits, vocab, words, BLOCK=_BLOCK, num_warps=4
        )
