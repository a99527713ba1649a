"""The lengths of a varlen batch, on the device for kernels and on the host for whoever must size a launch or a loop.

Both copies exist so that no layer waits for the device to learn a length the scheduler chose.
"""

from typing import NamedTuple

import torch


class VarlenBatch(NamedTuple):
    """Sequences lie back to back in one token dimension; query tokens are the last of each sequence's context."""

    block_tables: torch.Tensor  # [seqs, max_blocks] int64, padded with any valid block
    cu_seqlens_q: torch.Tensor  # [seqs + 1] int32, starts of the sequences in the token dimension
    context_lens: torch.Tensor  # [seqs] int32, cached prefix + query tokens
    host_q_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
