"""Moves experts between the ranks of a stage while they serve, so that the slowest rank has less to compute.

All ranks look at the same counts before the same steps, so they decide alike: the first one's where every rank sees all tokens, the sum of all where
each has tokens of its own.
Refuses to know how a placement is found.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator

log = logging.getLogger(__name__)

_LOOK_AFTER = 1024  # tokens
_GAIN = 0.95  # of the slowest rank's load: above, moving is not worth its time


class ExpertBalancer:
    def __init__(self, ranks: "Communicator") -> None:
        self._ranks = ranks
        self._num_tokens = 0
        self._planned: deque[tuple[int, ExpertPlacement]] = deque()
        self.may_write = True  # into this rank's weights: no file has their pages
        self.moved = 0  # counter: layers

    def before_step(self, model: Decoder, num_tokens: int) -> None:
        """Take part in what is planned, one layer before each step, or look at the loads: every rank of the stage calls this before the same
        steps."""
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
        # Of a model that has just taken another's place this rank has counted nothing: it takes part all the same.
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
        """Bring experts to where they shall be: each from the first rank that has it, to all. Nothing is overwritten before all are there."""
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
    """Return the experts of each layer whose ranks have some of them."""
    return [part.experts for part in sparse_parts_of(model)]


def sparse_parts_of(model: Decoder) -> list[SparseMLP]:
    """Return the feed-forward of each of those layers."""
    found = [layer.feed_forward for layer in model.layers if isinstance(layer, DecoderLayer)]
    return [part for part in found if isinstance(part, SparseMLP) and part.experts.placement is not None]
