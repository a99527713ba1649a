"""Token embedding and the head that turns hidden states into logits, tied or not."""

import torch

from engine.weights.loader import WeightLoader
from kernels.linear import logits
from kernels.rows import rows_of


class TokenEmbedding:
    """weight [vocab, hidden]; `scale` multiplies what is looked up, never the head's logits."""

    def __init__(self, weight: torch.Tensor, scale: float | None = None) -> None:
        self.weight = weight
        # Rounded to the storage type, as the models were trained: Gemma's sqrt(1152) is 34.0 in bf16, not 33.94.
        self.scale = None if scale is None else torch.tensor(scale, dtype=weight.dtype).item()

    @classmethod
    def load(
        cls, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int, scale: float | None = None
    ) -> "TokenEmbedding":
        return cls(loader.tensor(f"{name}.weight", vocab_size, hidden_size), scale)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return rows_of(self.weight, token_ids, 1.0 if self.scale is None else self.scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The transposed use, as an output head: fp32 logits [rows, vocab]."""
        return logits(hidden, self.weight)
