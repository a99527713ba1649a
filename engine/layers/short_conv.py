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
        channels: Sequence[int],
        width: int,
        *,
        bias: bool = False,
        activates: bool = False,
    ) -> Self:
        """Load convolutions that the checkpoint may store apart, with `channels` channels each."""
        weight = loader.rows([f"{name}.weight" for name in names], channels, 1, width).squeeze(1)
        biases = [f"{name}.bias" for name in names]
        return cls(weight, loader.rows(biases, channels) if bias else None, activates)

    def __call__(self, x: torch.Tensor, kept: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """Convolve the tokens of the step, and keep each sequence's last inputs in `kept`.

        x [tokens, channels]; kept [blocks, 1, 1, (width - 1) * channels] -> [tokens, channels]
        """
        states = torch.unflatten(kept[:, 0, 0], 1, (self.weight.shape[1] - 1, x.shape[1]))
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
            Linear.load(loader, [f"{name}.in_proj"], [3 * channels], hidden_size, bias),
            CausalConv.load(loader, [f"{name}.conv"], [channels], shape.width, bias=bias),
            Linear.load(loader, [f"{name}.out_proj"], [hidden_size], channels, bias),
            shape,
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""
        before, behind, inner = self.in_proj(x, context).chunk(3, dim=1)
        cache = context.caches[self.shape.layer]
        mixed = self.conv(before * inner, cache.segments[0], context.states[cache.group])
        return self.out_proj(behind * mixed, context)
