"""Token embedding and the head that turns hidden states into logits, tied or not."""

import torch
import torch.nn.functional as F

from engine.layers.weights import WeightLoader


class Embedding:
    """weight [vocab, hidden]"""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @classmethod
    def load(cls, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int) -> "Embedding":
        return cls(loader.tensor(f"{name}.weight", vocab_size, hidden_size))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The transposed use, as an output head: fp32 logits [rows, vocab]."""
        return F.linear(hidden, self.weight).float()
