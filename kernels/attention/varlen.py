"""The lengths of a varlen batch: on the device for kernels, on the host to size launches and loops.

With both copies no layer waits for the device to return a length that the host already knows.
"""

from typing import NamedTuple

import torch

FEW_QUERIES = 16  # with at most so many queries per sequence, tokens are computed like decodes (`of_tokens`)


class VarlenBatch(NamedTuple):
    """A batch of sequences concatenated in one token dimension.

    Queries are the last tokens of each context.
    """

    block_tables: torch.Tensor  # [seqs, max_blocks] int64, padded with any valid block
    cu_seqlens_q: torch.Tensor  # [seqs + 1] int32, where each sequence starts in the token dimension
    context_lens: torch.Tensor  # [seqs] int32, cached prefix + query tokens
    host_q_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    # [tokens] int32, never decreasing within a sequence: each query also sees the keys from its own position to this one; None if there are no such
    # keys.
    last_visible: torch.Tensor | None = None

    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table of each token, and how many first tokens of its context it sees.

        They are [tokens, max_blocks] and [tokens] int64.
        """
        numbers, q_lens = torch.arange(len(self.host_q_lens), device=self.block_tables.device), self.cu_seqlens_q.diff()
        tokens = sum(self.host_q_lens)
        sequences = torch.repeat_interleave(numbers, q_lens, output_size=tokens)
        before = (self.context_lens - q_lens - self.cu_seqlens_q[:-1]).index_select(0, sequences)
        visible = before + torch.arange(1, tokens + 1, device=before.device)
        return self.block_tables.index_select(0, sequences), visible
