"""Matrix products with a weight as checkpoints keep it, [outputs, inputs]: a projection, a gated pair with its activation, a head.

Knows which activations may be fused; refuses to know what is projected. A few rows on a CPU read the weight where it lies, once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels import tuning
from kernels.activation import FUSED
from kernels.cpu import ops
from kernels.fp8 import Fp8Weight
from kernels.int4 import Int4Weight
from kernels.packed import Packed, Weight
from kernels.quantized_linear import fp8_linear, int4_linear, mxfp4_linear

GatedActivation = Callable[[torch.Tensor], torch.Tensor]  # [tokens, 2 * intermediate] -> [tokens, intermediate]


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, inputs], weight [outputs, inputs], bias [outputs] -> [tokens, outputs]."""
    if not isinstance(weight, torch.Tensor):
        return _packed_linear(x, weight, bias)
    y = ops.linear(x, weight, bias)
    if y is not None:
        return y
    if x.is_cuda and x.shape[0] <= tuning.MOST_TOKENS and x.dtype != torch.float32:
        chosen = tuning.choice(x.shape[0], weight.shape[0], weight.shape[1], x.device)
        if chosen is not None:
            return tuning.run(chosen, x, weight, bias)
    return F.linear(x, weight, bias)


def gated_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """x [tokens, inputs], weight [2 * intermediate, inputs], gate rows above up rows -> [tokens, intermediate]."""
    fused = FUSED.get(activation)
    y = ops.linear(x, weight, bias, fused) if fused is not None and isinstance(weight, torch.Tensor) else None
    return activation(linear(x, weight, bias)) if y is None else y


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [rows, inputs], weight [vocab, inputs] -> fp32 [rows, vocab], rounded to the storage type before."""
    y = ops.linear(hidden, weight, wide_output=True)
    return linear(hidden, weight).float() if y is None else y


def _packed_linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, Int4Weight):
        return int4_linear(x, weight, bias)
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight, bias)
    return mxfp4_linear(x, weight, bias)
