"""The lengths of a varlen batch: on the device for kernels, on the host to size launches and loops.

With both copies no layer waits for the device to return a length that the host already knows.
"""

from typing import NamedTuple

import torch


class VarlenBatch(NamedTuple):
    """A batch of sequences concatenated in one token dimension.

    Queries are the last tokens of each context.
    """

    block_tables: torch.Tensor  # [seqs, max_blocks] int64, padded with any valid block
    cu_seqlens_q: torch.Tensor  # [seqs + 1] int32, where each sequence starts in the token dimension
    context_lens: torch.Tensor  # [seqs] int32, cached prefix + query tokens
    host_q_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
