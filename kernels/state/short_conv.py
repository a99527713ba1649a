"""The short causal convolution of layers that keep a recurrent state.

Each channel is convolved separately, over a token and the width - 1 tokens before it:

    y[t] = activation(bias + sum over j < width of weight[:, j] * x[t - width + 1 + j])

A sequence's state consists of the inputs at its last width - 1 tokens. Sums are in fp32.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import state_ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.state.state_batch import StateBatch


def _check(
    check: ArgumentCheck,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activates: bool,
    states: torch.Tensor,
    batch: StateBatch,
) -> None:
    check.tensor("x", x, "tokens channels", dense=1)
    check.tensor("weight", weight, "channels width", (x.dtype,), dense=2)
    width = check.size("width")
    check.require("weight", width > 1, f"has a width of {width}, wanted 2 or more")
    if bias is not None:
        check.tensor("bias", bias, "channels", (x.dtype,), dense=1)
    check.derive("width-1", width - 1, "weight")
    check.tensor("states", states, "blocks width-1 channels", (x.dtype,), dense=2)
    batch.require(check, x.shape[0], states.shape[0])


@operation(_check, triton="state.short_conv", native=state_ops.short_conv)
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activates: bool,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Convolve the tokens of the batch, and update the states in place; return [tokens, channels].

    x [tokens, channels]; weight [channels, width]; bias [channels]; states [blocks, width - 1, channels]. `activates`: whether SiLU is applied. A
    token's result has the same bits in any batch.
    """
    before = weight.shape[1] - 1

    def at_once(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat((state, x[tokens].unsqueeze(1)), dim=1)
        return _sums([seen[:, j] for j in range(before + 1)], weight, bias, activates), seen[:, 1:]

    def run(tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat((state, x[tokens]))
        length = seen.shape[0] - before
        return _sums([seen[j : j + length] for j in range(before + 1)], weight, bias, activates), seen[length:]

    return batch.compute(states, at_once, run)


def _sums(inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, activates: bool) -> torch.Tensor:
    """Return outputs [tokens, channels]. inputs[i] is multiplied by column i of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = bias.to(wide) if bias is not None else torch.zeros((), dtype=wide, device=weight.device)
    for x, column in zip(inputs, weight.unbind(1), strict=True):
        y = torch.addcmul(y, x.to(wide), column.to(wide))
    return (F.silu(y) if activates else y).to(weight.dtype)
