"""The short causal convolution of layers that keep a state: each channel for itself, over a token and the few before it.

    y[t] = activation(bias + sum over j < width of weight[:, j] * x[t - width + 1 + j])

What it keeps of a sequence are its inputs at the last width - 1 tokens. Sums are in fp32.
"""

from collections.abc import Callable

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None
) -> torch.Tensor:
    """x [width - 1 + tokens, channels], the first of which are kept ones; weight [channels, width]; bias [channels] -> y [tokens, channels]"""
    width = weight.shape[1]
    tokens = x.shape[0] - width + 1
    y = bias.float() if bias is not None else torch.zeros((), device=x.device)
    for j in range(width):
        y = torch.addcmul(y, x[j : j + tokens].float(), weight[:, j].float())
    return (y if activation is None else activation(y)).to(x.dtype)


def short_conv_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None
) -> torch.Tensor:
    """x [sequences, width, channels], each one's kept tokens with its newest -> y [sequences, channels], with the bits of `short_conv`"""
    y = bias.float() if bias is not None else torch.zeros((), device=x.device)
    for j in range(weight.shape[1]):
        y = torch.addcmul(y, x[:, j].float(), weight[:, j].float())
    return (y if activation is None else activation(y)).to(x.dtype)
