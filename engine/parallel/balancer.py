"""Moves experts between the ranks of a stage during serving, to relieve the slowest rank.

All ranks look at the same counts before the same steps, so they make the same decisions. The counts are those of the first rank if every rank sees
all tokens, or the sum over the ranks if each has its own tokens. This module is independent of how a placement is found.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.layers.moe import Experts, ParallelFeedForward, SparseMLP
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator

log = logging.getLogger(__name__)

_LOOK_AFTER = 1024  # tokens between two checks of the loads
_GAIN = 0.95  # experts only move if the slowest rank's load falls below this share of the present one


class ExpertBalancer:
    def __init__(self, ranks: "Communicator") -> None:
        self._ranks = ranks
        self._num_tokens = 0
        self._planned: deque[tuple[int, ExpertPlacement]] = deque()
        self.may_write = True  # False while this rank's weights are mapped from a file
        self.moved = 0  # counter of layers whose experts were moved

    def before_step(self, model: Decoder, num_tokens: int) -> None:
        """Move the experts of one planned layer, or check the loads after enough tokens.

        Every rank of the stage calls this before the same steps.
        """
        if self._planned:
            number, placement = self._planned.popleft()
            self._move(experts_of(model)[number], placement)
            return
        self._num_tokens += num_tokens
        if self._num_tokens >= _LOOK_AFTER:
            self._num_tokens = 0
            self._look(experts_of(model))

    def _look(self, layers: list[Experts]) -> None:
        if not layers:
            return
        # If this rank's model was just replaced, its counts are zero; the rank takes part anyway.
        seen = torch.stack([layer.counted() for layer in layers])
        seen = self._ranks.total(seen) if self._ranks.copies > 1 else self._ranks.from_rank(0, seen)
        ready = self._ranks.total(torch.full((1,), self.may_write, dtype=torch.int64, device=seen.device))
        for number, (layer, loads) in enumerate(zip(layers, seen.tolist(), strict=True)):
            layer.seen = layer.counted() // 2  # older tokens count less
            if layer.placement is None or int(ready) < self._ranks.size:
                continue
            placement = layer.placement.balanced(loads)
            if placement.slowest(loads) < _GAIN * layer.placement.slowest(loads):
                self._planned.append((number, placement))
        if self._planned and self._ranks.is_first:
            log.info("experts of %d layers move between %d ranks", len(self._planned), self._ranks.size)

    def _move(self, layer: Experts, placement: ExpertPlacement) -> None:
        """Move experts to their new slots; the first rank that has an expert sends it to all.

        Nothing is overwritten before all experts have arrived.
        """
        old, rank = layer.placement, self._ranks.rank
        assert old is not None
        coming = [
            {new: slot for slot, (before, new) in enumerate(zip(*slots, strict=True)) if before != new}
            for slots in zip(old.slots, placement.slots, strict=True)
        ]
        here = coming[rank]
        arrived = []
        for expert in sorted({expert for of_rank in coming for expert in of_rank}):
            source = old.ranks_of(expert)[0]
            slot = old.slots[rank].index(expert) if rank == source else 0
            for part in layer.parts:
                sent = part[slot : slot + 1].clone() if rank == source else torch.empty_like(part[:1])
                got = self._ranks.from_rank(source, sent.view(torch.uint8)).view(part.dtype)
                if expert in here:
                    arrived.append((part[here[expert]], got[0]))
        for place, content in arrived:
            place.copy_(content)
        layer.place(placement)
        self.moved += 1


def experts_of(model: Decoder) -> list[Experts]:
    """Return the experts of each layer whose experts are divided among ranks."""
    return [part.experts for part in sparse_parts_of(model)]


def sparse_parts_of(model: Decoder) -> list[SparseMLP]:
    """Return the feed-forward of each layer whose experts are divided among ranks."""
    whole = [layer.feed_forward for layer in model.layers if isinstance(layer, DecoderLayer)]
    found = [part.sparse if isinstance(part, ParallelFeedForward) else part for part in whole]
    return [part for part in found if isinstance(part, SparseMLP) and part.experts.placement is not None]
