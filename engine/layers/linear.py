"""Matrix products with optional bias, fused if several matrices have the same input."""

from collections.abc import Sequence

import torch

from pilotlight.engine.execution.context import Context
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Split
from pilotlight.kernels.matrices.weight import GatedActivation, Weight


class Linear:
    """A product with weight [rows, columns], plain or packed, and bias [rows] or None."""

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None = None, first: int = 0, ends: tuple[int, ...] = ()
    ) -> None:
        """`first`: index of the first projection in the model; `ends`: end of each projection's rows.

        Both are needed for adapters.
        """
        self.weight = weight
        self.bias = bias
        self._first = first
        self._ends = ends

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        bias: bool,
        split: Split | None = None,
        unit: int | Sequence[int] = 1,
        repeats: bool = False,
    ) -> "Linear":
        """Load the projections `names` as one stacked matrix.

        Adapters may change them, but not runs of one tensor. `split`, `unit`, `repeats`: how ranks share them, as in the loader's `matrix`.
        """
        weight = loader.matrix(names, rows, columns, split=split, unit=unit, repeats=repeats)
        biases = [f"{name}.bias" for name in names]
        # some quantizers write biases, mostly zeros, for families that have none
        has_bias = bias or (loader.is_quantized and loader.has_rows(biases))
        if has_bias and split == "columns" and loader.shard.rank:
            loader.skip_tensors(biases)  # the ranks' products are summed, so only the first rank adds the bias
            has_bias = False
        first, ends = loader.note_projections(names, rows, columns, split=split, unit=unit, repeats=repeats)
        added = loader.rows(biases, rows, split=split, unit=unit, repeats=repeats) if has_bias else None
        return cls(weight, added, first, ends)

    @classmethod
    def load_runs(
        cls, loader: WeightLoader, name: str, runs: Sequence[tuple[int, int]], columns: int, bias: bool
    ) -> "Linear":
        """Load a projection whose rows are several runs, each (rows, unit), which ranks divide one by one."""
        if loader.shard.size == 1:
            return cls.load(loader, [name], [sum(rows for rows, _ in runs)], columns, bias)
        rows, units = [count for count, _ in runs], [unit for _, unit in runs]
        return cls.load(loader, [name] * len(runs), rows, columns, bias, "rows", units, repeats=True)

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        y = self.plain(x)
        if context.adapters is None or not self._ends:
            return y
        return context.adapters.add(y, x, self._first, self._ends)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [tokens, columns] without adapters; return [tokens, rows]."""
        return self.weight.linear(x, self.bias)

    def gated(self, x: torch.Tensor, activation: GatedActivation, context: Context) -> torch.Tensor:
        """Multiply x [tokens, columns] by gate and up, stacked in one matrix, and apply the activation."""
        return self.weight.gated(x, self.bias, activation) if context.adapters is None else activation(self(x, context))
