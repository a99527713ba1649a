"""One step's input as tensors, whose token dimension has first decodes, then prompt chunks.

This module is independent of models.
"""

from dataclasses import dataclass

import torch

from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.state.state_batch import StateBatch


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    block_tables: torch.Tensor  # [seqs, max_blocks] int64
    context_lens: torch.Tensor  # [seqs] int64
    max_context_len: int


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """The places of a step's tokens, and of all tokens before them, in the cache of one group of layers."""

    slot_mapping: torch.Tensor  # [tokens] int64
    decode: DecodeBatch | None = None
    verify: VarlenBatch | None = None  # replaces `decode` if some decodes check drafts
    prefill: VarlenBatch | None = None  # prompt chunks
    states: StateBatch | None = None  # None unless the layers keep states


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    groups: tuple[GroupBatch, ...]  # one for each group of layers; most models have one
    num_decoded: int  # number of tokens of decodes and their drafts, which come first
    logit_rows: torch.Tensor | None = None  # [rows] int64, tokens whose logits are needed; None for all
    adapter_slots: torch.Tensor | None = None  # [tokens] int64, -1 for none; None if no token has an adapter
    token_types: torch.Tensor | None = None  # [tokens] int64, 1 in a pair's second text; None if no text is a pair
