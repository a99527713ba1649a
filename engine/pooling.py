"""The hidden states of texts, chunk by chunk, to one vector each: mean of all tokens, the first (cls) or the last.

What earlier chunks contributed waits on the sequence, in fp32, and is gone when the sequence is preempted. Refuses to know models.
"""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch
import torch.nn.functional as F

from engine.plan import Chunk
from engine.protocol import Pooling
from engine.transfer import to_device
from kernels.pooling import Pooled, pool_pieces

PIECES: dict[Pooling, Pooled] = {"mean": "sum", "last": "last", "cls": "first"}


def pool(chunks: SequenceOf[Chunk], hidden: torch.Tensor, is_normalized: bool) -> list[torch.Tensor | None]:
    """hidden [tokens, hidden], behind the final norm, chunk after chunk -> for each chunk that ends a text its vector [hidden] fp32."""
    vectors: list[torch.Tensor | None] = [None] * len(chunks)
    kinds = {chunk.sequence.pooling for chunk in chunks} - {None}
    if not kinds:
        return vectors
    lens = tuple([chunk.length for chunk in chunks])
    starts = to_device(torch.tensor([0, *accumulate(lens)], dtype=torch.int32), hidden.device)
    for kind in kinds:
        assert kind is not None
        pieces = pool_pieces(hidden, starts, lens, PIECES[kind]).unbind()
        for i, chunk in enumerate(chunks):
            if chunk.sequence.pooling == kind:
                vectors[i] = _add(chunk, pieces[i], kind, is_normalized)
    return vectors


def _add(chunk: Chunk, piece: torch.Tensor, kind: Pooling, is_normalized: bool) -> torch.Tensor | None:
    """Add the chunk's tokens to the text's sum, and return its vector; None until the chunk that ends it."""
    sequence = chunk.sequence
    if chunk.start == 0 or kind == "last":
        sequence.pooled = piece
    elif kind == "mean":
        sequence.pooled = sequence.pooled + piece
    if not chunk.is_last:
        return None
    vector = sequence.pooled / len(sequence.token_ids) if kind == "mean" else sequence.pooled
    sequence.pooled = None
    return F.normalize(vector, dim=0) if is_normalized else vector
