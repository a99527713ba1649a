"""Matrix products with a plain weight [outputs, inputs], as in checkpoints.

There are three: a projection, a gated pair with its activation, and a head for logits. This module knows the activations that can be fused. On a CPU
a product with few rows reads the weight once, in place.
"""

from functools import partial

import torch
import torch.nn.functional as F

from pilotlight.kernels import tuning
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.activation import gated_native
from pilotlight.kernels.matrices.weight import GatedActivation


def _check(
    check: ArgumentCheck, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: object
) -> None:
    check.tensor("hidden" if check.operation == "logits" else "x", x, "tokens inputs")
    check.tensor("weight", weight, "outputs inputs", (x.dtype,))
    if bias is not None:
        check.tensor("bias", bias, "outputs", (x.dtype,))


@operation(_check, native=ops.linear, guards_itself=True)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [tokens, inputs] times weight [outputs, inputs] plus bias [outputs], as [tokens, outputs]."""
    return _product(x, weight, bias)


@operation(_check, native=gated_native(ops.linear), guards_itself=True)
def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """Return the activation [tokens, intermediate] of x [tokens, inputs] times the weight.

    weight [2 * intermediate, inputs]: gate rows, then up rows.
    """
    return activation(_product(x, weight, bias))


@operation(_check, native=partial(ops.linear, wide_output=True), guards_itself=True)
def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [rows, vocab].

    hidden [rows, inputs], weight [vocab, inputs].
    """
    return _product(hidden, weight, None).float()


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.is_cuda and x.shape[0] <= tuning.MOST_TOKENS and x.dtype != torch.float32:
        chosen = tuning.best_tile(x.shape[0], weight.shape[0], weight.shape[1], x.device)
        dense = x.stride(1) == weight.stride(1) == 1 and (bias is None or bias.is_contiguous())
        if chosen is not None and dense:
            return tuning.run(chosen, x, weight, bias)
    return F.linear(x, weight, bias)
