"""Log probabilities from raw logits, chunk by chunk; one program per row joins the chunks' results.

Each chunk of a row writes its likeliest tokens, its highest logit and the sum of powers relative to it. Of equal logits, the first token comes first.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import dense_rows

CHUNK = 4096  # logits per program, in registers, from which the likeliest are taken one by one
_NOBODY = tl.constexpr(0x7FFFFFFF)


@jit(of_batch=("num_top",))
def _of_chunk(logits, tops, sums, top_ids, top_logits, row_stride, vocab, chunks, num_top, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64) // chunks, tl.program_id(0) % chunks
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    left = token < vocab
    values = tl.load(logits + row * row_stride + token, mask=left, other=float("-inf"))
    top = tl.max(values, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    at = row * chunks + chunk
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(values - shift), axis=0))
    for i in range(0, num_top):
        top = tl.max(tl.where(left, values, float("-inf")), axis=0)
        best = tl.min(tl.where(left & (values == top), token, _NOBODY), axis=0)
        tl.store(top_ids + at * num_top + i, best)
        tl.store(top_logits + at * num_top + i, top)
        left = left & (token != best)


@jit(of_batch=("token_ids", "num_top"))
def _of_row(
    logits, token_ids, tops, sums, top_ids, top_logits, chosen, ids, logprobs, row_stride, chunks, num_top,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    its_tops = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    its_sums = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(its_tops, axis=0)
    normaliser = top + tl.log(tl.sum(its_sums * tl.exp(its_tops - top), axis=0))
    tl.store(chosen + row, tl.load(logits + row * row_stride + tl.load(token_ids + row)) - normaliser)
    # Each chunk's tokens are a sorted queue. The best of the queues' heads is taken, and the next token of that queue becomes its head.
    head = tl.zeros([CHUNKS], tl.int32)
    for i in range(0, num_top):
        at = (row * chunks + chunk) * num_top + head
        waits = (chunk < chunks) & (head < num_top)
        token = tl.load(top_ids + at, mask=waits, other=_NOBODY)
        values = tl.load(top_logits + at, mask=waits, other=float("-inf"))
        top = tl.max(tl.where(token == _NOBODY, float("-inf"), values), axis=0)
        best = tl.min(tl.where(values == top, token, _NOBODY), axis=0)
        tl.store(ids + row * num_top + i, best.to(tl.int64))
        tl.store(logprobs + row * num_top + i, top - normaliser)
        head += tl.where(token == best, 1, 0)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute token_logprobs of kernels/sampling/logprobs.py."""
    logits = dense_rows(logits)
    rows, vocab = logits.shape
    device = logits.device
    num_top = min(num_top, vocab)
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    ids = torch.empty((rows, num_top), dtype=torch.int64, device=device)
    logprobs = torch.empty((rows, num_top), dtype=torch.float32, device=device)
    if not rows:
        return chosen, ids, logprobs
    chunks = triton.cdiv(vocab, CHUNK)
    tops = torch.empty(rows * chunks, dtype=torch.float32, device=device)
    sums = torch.empty_like(tops)
    top_ids = torch.empty(rows * chunks * num_top, dtype=torch.int32, device=device)
    top_logits = torch.empty(rows * chunks * num_top, dtype=torch.float32, device=device)
    row_stride = logits.stride(0)
    _of_chunk[(rows * chunks,)](
        logits, tops, sums, top_ids, top_logits, row_stride, vocab, chunks, num_top, CHUNK=CHUNK, num_warps=8
    )
    _of_row[(rows,)](
        logits, token_ids.contiguous(), tops, sums, top_ids, top_logits, chosen, ids, logprobs, row_stride, chunks, num_top,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return chosen, ids, logprobs
