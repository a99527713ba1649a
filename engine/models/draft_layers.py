"""Drafters whose state is in the model's blocks: a smaller model, or one layer (EAGLE-3, MTP).

The layer reads the model's features of the previous token. In a step the model and the drafter are computed for the same tokens (`follow`), so blocks
always include the drafter's state, even if they come from the prefix cache, a tier or another host. Between steps the drafter runs alone on guessed
tokens (`forward`), after the sequence's own; the step that verifies them overwrites these values. This module is independent of sequences and of the
acceptance of guesses.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.execution.batch import Batch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import LayerCache
from pilotlight.engine.models.decoder import Decoder, DraftHead
from pilotlight.engine.models.model import Model

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class DraftModel:
    """A model of the same vocabulary, whose layers' caches come after the model's."""

    def __init__(self, model: Model, first: int) -> None:
        """`first`: the index of its first layer's cache."""
        self._model = model
        self._first = first

    def follow(self, model: Model, context: Context) -> torch.Tensor:
        hidden = model.forward(context)
        self.forward(context)
        return hidden

    def forward(self, context: Context) -> torch.Tensor:
        return self._model.forward(replace(context, caches=context.caches[self._first :], adapters=None, images=None))

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        return self._model.logits(hidden, ranks)


class FeatureDrafts:
    """A drafting head over the model's features of earlier tokens.

    Heads are trained on pairs of a token and the features of the previous one. A sequence's first token has no previous one, so its features are
    zeros: every position has a row, and a block's content depends only on its own and earlier tokens.
    """

    def __init__(self, head: DraftHead, cache: int) -> None:
        """`cache`: the index of the cache that keeps features."""
        self._head = head
        self._cache = cache

    def follow(self, model: Model, context: Context) -> torch.Tensor:
        assert isinstance(model, Decoder), "an encoder has no drafts"
        hidden, tapped = model.tapped(context, self._head.taps)
        self._keep(self._head.features(hidden, tapped), context)
        self._compute(context)
        return hidden

    def forward(self, context: Context) -> torch.Tensor:
        hidden = self._compute(context)
        self._keep(hidden, context)
        return hidden

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        return self._head.logits(hidden, ranks)

    def _compute(self, context: Context) -> torch.Tensor:
        cache = context.caches[self._cache]
        (kept,) = cache.segments
        slots, block_size = slots_before(context.batch, cache), kept.shape[1]
        # For a sequence's first token `slots` has the token's own slot, because there is no previous token.
        has_before = slots != context.batch.groups[cache.group].slot_mapping
        before = kept[slots // block_size, slots % block_size, 0] * has_before.unsqueeze(1)
        context = self._head.prepared(replace(context, adapters=None))
        return self._head(self._head.embed(context), before, context)

    def _keep(self, features: torch.Tensor, context: Context) -> None:
        cache = context.caches[self._cache]
        (kept,), slots = cache.segments, context.batch.groups[cache.group].slot_mapping
        kept[slots // kept.shape[1], slots % kept.shape[1], 0] = features


def slots_before(batch: Batch, cache: LayerCache) -> torch.Tensor:
    """Return the slot of the token before each token, [tokens]; for a sequence's first token its own slot."""
    group, (kept,) = batch.groups[cache.group], cache.segments
    block_size, decoded = kept.shape[1], batch.num_decoded
    slots = []
    if group.decode is not None:
        before = (group.decode.context_lens - 2).clamp(min=0)
        blocks = group.decode.block_tables.gather(1, (before // block_size).unsqueeze(1)).squeeze(1)
        slots.append(blocks * block_size + before % block_size)
    for varlen, count in ((group.verify, decoded), (group.prefill, len(batch.token_ids) - decoded)):
        if varlen is not None:
            tokens = torch.arange(count, device=batch.token_ids.device, dtype=torch.int32)
            ends = varlen.cu_seqlens_q[1:].contiguous()
            rows = torch.searchsorted(ends, tokens, right=True)
            before = (varlen.context_lens[rows] - ends[rows] + tokens - 1).clamp(min=0).long()
            slots.append(varlen.block_tables[rows, before // block_size] * block_size + before % block_size)
    return torch.cat(slots)
