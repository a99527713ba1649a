"""A model, as what runs it sees it: whatever its family, and whichever of its stages are here."""

from typing import TYPE_CHECKING, Protocol

import torch

from engine.context import Context

if TYPE_CHECKING:
    from engine.parallel.communicator import Communicator


class Model(Protocol):
    def forward(self, context: Context) -> torch.Tensor:
        """Return the hidden states of every token, normalised: [tokens, hidden]."""

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """[rows, hidden] -> fp32 [rows, vocab], joined where ranks have parts of the vocabulary"""
