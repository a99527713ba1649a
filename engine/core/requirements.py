"""The requirements of a sequence before each chunk: valid blocks, grammar, adapter's slot, images.

This module requests them in time, and ends a sequence that cannot get what it needs. It is independent of steps and tokens.
"""

import logging
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from pilotlight.engine.adapters.adapter_residency import AdapterResidency, AdapterStore
from pilotlight.engine.api.protocol import ModelInfo, Submit
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.token_masks import TokenMasks
from pilotlight.engine.images.image_residency import ImageEncoder, ImageResidency
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.scheduling.awaited import Awaited, AwaitedTogether
from pilotlight.engine.scheduling.plan import Chunk

if TYPE_CHECKING:
    import torch

    from pilotlight.engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

# Most blocks that are compared in Python: up to this number it is as fast as torch, whose code is no longer in the CPU's caches after a step.
_FEW = 1024


class Requirements:
    def __init__(
        self,
        info: ModelInfo,
        sequences: OpenSequences,
        clock: Callable[[], float],
        grammars: Grammars | None,
        adapters: AdapterStore | None,
        images: ImageEncoder | None,
    ) -> None:
        """`clock`: the scheduler's; other arguments as for Engine."""
        self.token_masks = TokenMasks(info, grammars, sequences)
        self.adapters = AdapterResidency(info.name, adapters)
        self.images = None if images is None else ImageResidency(images)
        self._model = info.name
        self._sequences = sequences
        self._clock = clock

    def images_of(self, submit: Submit) -> tuple[SequenceImage, ...] | None:
        """Return a sequence's images, or None if one was sent without data and is not cached."""
        if not submit.images:
            return ()
        assert self.images is not None, "a model without an encoder refuses images"
        return self.images.of(submit)

    def awaited(self, sequence: Sequence) -> Awaited | None:
        """Return what a sequence has to wait for before it can be admitted, or None."""
        grammar = self.token_masks.awaited(sequence, self._clock)
        adapter = self.adapters.awaited(sequence, self._clock)
        if grammar is not None and adapter is not None:
            return AwaitedTogether((grammar, adapter))
        return grammar or adapter

    def is_computable(self, chunk: Chunk, scheduler: "Scheduler") -> bool:
        """True if a chunk's sequence has what it needs, checked before the chunk joins a step.

        Otherwise it waits for its images, or ends.
        """
        sequence = chunk.sequence
        if sequence.constraint is None and sequence.adapter is None and not sequence.images:
            return True
        chunks = self.adapters.computable(self.token_masks.enforceable([chunk]), self._sequences)
        return bool(chunks and (self.images is None or self.images.computable(chunks, scheduler.defer)))

    def without_stale(self, chunks: list[Chunk], scheduler: "Scheduler") -> list[Chunk]:
        """Return the chunks that still own all of their blocks, and end the other sequences.

        They end before they read or write a block that now belongs to another sequence.
        """
        sequences = [chunk.sequence for chunk in chunks]
        places = stale(scheduler.pool.generations, sequences)
        for sequence in [sequences[i] for i in places]:
            log.error("%s: a block of sequence %s was handed to another one", self._model, sequence.sequence_id)
            message = "a block of the sequence's KV cache was handed to another one; send the request again"
            self._sequences.fail(sequence, "engine_error", message)
        return [chunk for i, chunk in enumerate(chunks) if i not in places] if places else chunks

    def encode_images(self, most_s: float) -> bool:
        """Encode at least one awaited piece, and more within `most_s`; return whether any was encoded."""
        return self.images is not None and self.images.encode(self._clock, most_s, self._sequences)

    def release(self, sequence: Sequence) -> None:
        """Release what an ended sequence holds."""
        self.adapters.release(sequence)
        if self.images is not None:
            self.images.release(sequence)

    def release_all(self) -> None:
        """Release everything: all sequences have ended."""
        self.adapters.release_all()
        if self.images is not None:
            self.images.release_all()

    def close(self) -> None:
        self.token_masks.close()
        self.adapters.close()
        if self.images is not None:
            self.images.close()


def stale(generations: "array[int]", sequences: SequenceOf[Sequence]) -> list[int]:
    """Return the indices of sequences that hold a block which now belongs to another: an internal error.

    `generations`: one number per block, which grows when the block is handed out again or leaves the model. A table has the numbers of its blocks
    from when it received them; any difference is an error. Many blocks are compared by torch, without a Python loop.
    """
    blocks, remembered = array("q"), array("q")
    for sequence in sequences:
        for table in sequence.tables:
            blocks += table.blocks
            remembered += table.generations
    if not blocks:
        return []
    assert len(blocks) == len(remembered), "a block table and its generations differ in length"
    if len(blocks) <= _FEW:
        current = array("q", map(generations.__getitem__, blocks))
        if current == remembered:
            return []
        return _places([a != b for a, b in zip(current, remembered, strict=True)], sequences)
    differs = _tensor(generations)[_tensor(blocks)] != _tensor(remembered)
    return _places(differs.tolist(), sequences) if differs.any() else []


def _tensor(numbers: "array[int]") -> "torch.Tensor":
    import torch  # imported here because a host must be reachable before torch is imported

    return torch.frombuffer(numbers, dtype=torch.int64)


def _places(differs: list[bool], sequences: SequenceOf[Sequence]) -> list[int]:
    places, start = [], 0
    for i, sequence in enumerate(sequences):
        end = start + sum([len(table) for table in sequence.tables])
        if any(differs[start:end]):
            places.append(i)
        start = end
    return places
