"""Pooling of texts' hidden states, chunk by chunk: mean of all tokens, the first (cls) or the last.

Vectors of earlier chunks are kept here, in fp32, as long as steps have the text in `started_texts`. The function `finish` of the model's head
converts pooled vectors to results.
"""

from collections.abc import Callable
from itertools import accumulate

import torch

from pilotlight.engine.api.protocol import Pooling
from pilotlight.engine.core.step import PoolingInput, StepInput
from pilotlight.engine.device.transfer import to_device
from pilotlight.kernels.pooling import Pooled, pool_pieces

PIECES: dict[Pooling, Pooled] = {"mean": "sum", "last": "last", "cls": "first"}


class TextPooling:
    def __init__(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`finish`: converts pooled vectors [texts, hidden] fp32 to results [texts, numbers] fp32."""
        self._finish = finish
        self._started: dict[int, torch.Tensor] = {}  # by text: the pooled vector of its chunks so far

    def add(self, step: StepInput, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the vector [numbers] fp32 of each text that ends in this step, by the index of its chunk.

        `hidden` [tokens, hidden]: the output of the final norm for the step's tokens.
        """
        self._started = {text: piece for text, piece in self._started.items() if text in step.started_texts}
        starts = to_device(torch.tensor([0, *accumulate(step.lengths)], dtype=torch.int32), hidden.device)
        pooled: dict[int, torch.Tensor] = {}
        for kind in {chunk.kind for chunk in step.pooling}:
            pieces = pool_pieces(hidden, starts, step.lengths, PIECES[kind]).unbind()
            for chunk in step.pooling:
                if chunk.kind == kind and (vector := self._add(chunk, pieces[chunk.chunk])) is not None:
                    pooled[chunk.chunk] = vector
        if not pooled:
            return {}
        return dict(zip(pooled, self._finish(torch.stack(list(pooled.values()))).unbind(), strict=True))

    def _add(self, chunk: PoolingInput, piece: torch.Tensor) -> torch.Tensor | None:
        """Add a chunk to its text, and return the text's pooled vector, or None before its last chunk."""
        if not chunk.is_first and chunk.kind != "last":
            started = self._started.pop(chunk.text)
            piece = started + piece if chunk.kind == "mean" else started
        if not chunk.is_last:
            self._started[chunk.text] = piece
            return None
        return piece / chunk.num_tokens if chunk.kind == "mean" else piece
