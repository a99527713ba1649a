"""Token embedding, and the heads that compute logits of tokens or of classes from hidden states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pilotlight.engine.description.tensor_sizes import VOCABULARY_UNIT
from pilotlight.engine.execution.context import Context
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Shard
from pilotlight.engine.weights.stored_tensor import AxisRange
from pilotlight.kernels.matrices.weight import Weight

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class TokenEmbedding:
    """A table [vocab, hidden]; `scale` multiplies embeddings, never the head's logits."""

    def __init__(self, weight: Weight, dtype: torch.dtype, scale: float = 1.0, parts: Sequence[AxisRange] = ()) -> None:
        """`parts`: the ranks' ranges of the vocabulary, if several share it; `weight` is this rank's."""
        self.weight = weight
        self.parts = parts
        self.dtype = dtype
        # Rounded to the storage type, as in the models' training: Gemma's sqrt(1152) is 34.0 in bf16, not 33.94.
        self.scale = torch.tensor(scale, dtype=dtype).item()

    @classmethod
    def load(
        cls, loader: WeightLoader, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
    ) -> "TokenEmbedding":
        weight = loader.matrix([name], [vocab_size], hidden_size, split="rows", unit=VOCABULARY_UNIT)
        ranks = range(loader.shard.size)
        parts = [Shard(rank, len(ranks)).span(vocab_size, VOCABULARY_UNIT, name) for rank in ranks]
        return cls(weight, loader.dtype, scale, parts)

    def __call__(self, token_ids: torch.Tensor, context: Context) -> torch.Tensor:
        if context.ranks is None:
            return self.weight.rows(token_ids, self.dtype, self.scale)
        own = self.parts[context.ranks.shard.rank]
        is_here = (token_ids >= own.start) & (token_ids < own.end)
        rows = self.weight.rows(torch.where(is_here, token_ids - own.start, 0), self.dtype, self.scale)
        return context.ranks.sum(rows * is_here.unsqueeze(1))

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """Return fp32 logits [rows, vocab], with the table as output head."""
        logits = self.weight.logits(hidden)
        return logits if ranks is None else ranks.join(logits, [part.size for part in self.parts])


class ScoreHead:
    """A head of classes, weight [classes, hidden], the same on every rank."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    @classmethod
    def load(cls, loader: WeightLoader, name: str, num_classes: int, hidden_size: int) -> "ScoreHead":
        return cls(loader.unshared().unpacked().matrix([name], [num_classes], hidden_size))

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """Return fp32 logits [rows, classes] of hidden [rows, hidden]."""
        return self.weight.logits(hidden)
