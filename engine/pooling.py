"""The hidden states of a text, chunk by chunk, to one vector: mean of all tokens, the first (cls) or the last.

What earlier chunks contributed waits on the sequence, in fp32, and is gone when the sequence is preempted. Refuses to know models.
"""

import torch
import torch.nn.functional as F

from engine.plan import Chunk


def pool(chunk: Chunk, hidden: torch.Tensor, is_normalized: bool) -> torch.Tensor | None:
    """hidden [chunk.length, hidden], behind the final norm -> [hidden] fp32. None until the chunk that ends the text."""
    sequence = chunk.sequence
    if sequence.pooling is None:
        return None
    if sequence.pooling == "mean":
        total = hidden.sum(0, dtype=torch.float32)
        sequence.pooled = total if chunk.start == 0 else sequence.pooled + total
    elif sequence.pooling == "last":
        sequence.pooled = hidden[-1].float()
    elif chunk.start == 0:
        sequence.pooled = hidden[0].float()
    if not chunk.is_last:
        return None
    vector = sequence.pooled / len(sequence.token_ids) if sequence.pooling == "mean" else sequence.pooled
    sequence.pooled = None
    return F.normalize(vector, dim=0) if is_normalized else vector
