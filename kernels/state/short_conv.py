"""The short causal convolution of layers that keep a recurrent state.

Each channel is convolved separately, over a token and the width - 1 tokens before it:

    y[t] = activation(bias + sum over j < width of weight[:, j] * x[t - width + 1 + j])

The state of a sequence is the inputs at its last width - 1 tokens. Sums are in fp32.
"""

from collections.abc import Callable

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None
) -> torch.Tensor:
    """Convolve the tokens of one sequence.

    x [width - 1 + tokens, channels], the state and then the tokens; weight [channels, width]; bias [channels] -> y [tokens, channels]
    """
    width = weight.shape[1]
    tokens = x.shape[0] - width + 1
    y = bias.float() if bias is not None else torch.zeros((), device=x.device)
    for j in range(width):
        y = torch.addcmul(y, x[j : j + tokens].float(), weight[:, j].float())
    return (y if activation is None else activation(y)).to(x.dtype)


def short_conv_step(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None
) -> torch.Tensor:
    """Convolve one token of each sequence, with results bit-identical to those of `short_conv`.

    x [sequences, width, channels], each state and then the token -> y [sequences, channels]
    """
    y = bias.float() if bias is not None else torch.zeros((), device=x.device)
    for j in range(weight.shape[1]):
        y = torch.addcmul(y, x[:, j].float(), weight[:, j].float())
    return (y if activation is None else activation(y)).to(x.dtype)
