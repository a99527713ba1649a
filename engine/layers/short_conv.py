"""The short causal convolution with its state, and LFM2's layer.

LFM2's layer is such a convolution between two gates (arXiv 2511.23404, section 2).
"""

from collections.abc import Sequence
from typing import Self

import torch

from pilotlight.engine.description.recurrent_shapes import ShortConvShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.activation import apply_gate
from pilotlight.kernels.state.short_conv import short_conv
from pilotlight.kernels.state.state_batch import StateBatch


class CausalConv:
    """A short causal convolution of each channel, with or without SiLU after it.

    weight [channels, width]; bias [channels] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activates: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.activates = activates

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        names: Sequence[str],
        runs: Sequence[tuple[int, int]],
        width: int,
        *,
        bias: bool = False,
        activates: bool = False,
    ) -> Self:
        """Load a convolution of several runs of channels.

        `runs`: (channels, unit) of each, which ranks divide one by one. `names`: one name for each run, or one for all if they are stored together.
        """
        channels, units = [count for count, _ in runs], [unit for _, unit in runs]
        if len(names) < len(runs) and loader.shard.size == 1:
            channels, units = [sum(channels)], [1]
        elif len(names) < len(runs):
            names = [names[0]] * len(runs)

        def rows(kind: str, *row_shape: int) -> torch.Tensor:
            stored = [f"{name}.{kind}" for name in names]
            return loader.rows(stored, channels, *row_shape, split="rows", unit=units, repeats=True)

        return cls(rows("weight", 1, width).squeeze(1), rows("bias") if bias else None, activates)

    def __call__(self, x: torch.Tensor, kept: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """Convolve the tokens of the step, and keep each sequence's last inputs in `kept`.

        x [tokens, channels]; kept [blocks, 1, 1, (width - 1) * channels of all ranks] -> [tokens, channels]
        """
        before = self.weight.shape[1] - 1
        states = torch.unflatten(kept[:, 0, 0, : before * x.shape[1]], 1, (before, x.shape[1]))
        return short_conv(x, self.weight, self.bias, self.activates, states, batch)


class ShortConv:
    def __init__(self, in_proj: Linear, conv: CausalConv, out_proj: Linear, shape: ShortConvShape) -> None:
        self.in_proj = in_proj
        self.conv = conv
        self.out_proj = out_proj
        self.shape = shape

    @classmethod
    def load(cls, loader: WeightLoader, layer_name: str, hidden_size: int, shape: ShortConvShape) -> Self:
        name, channels, bias = f"{layer_name}.{shape.name}", shape.channels, shape.is_biased
        return cls(
            Linear.load_runs(loader, f"{name}.in_proj", [(channels, 1)] * 3, hidden_size, bias),
            CausalConv.load(loader, [f"{name}.conv"], [(channels, 1)], shape.width, bias=bias),
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], channels, bias, "columns"),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        projected = torch.unflatten(self.in_proj(x, context), 1, (3, -1))
        before, behind, inner = projected[:, :1], projected[:, 1:2], projected[:, 2:]
        cache = context.caches[self.shape.layer]
        given = apply_gate(inner, before, False).squeeze(1)
        mixed = self.conv(given, cache.segments[0], context.states_of(cache))
        return context.summed(self.out_proj(apply_gate(mixed.unsqueeze(1), behind, False).squeeze(1), context))
