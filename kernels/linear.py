"""Matrix products with a weight as checkpoints keep it, [outputs, inputs]: a projection, a gated pair with its activation, a head.

Knows which activations may be fused; refuses to know what is projected. On a CPU a few rows read the weight where it lies, once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels import tuning
from kernels.activation import FUSED
from kernels.checks import FLOATS, Call, placed
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
    return _product("linear", x, weight, bias) if y is None else y


def gated_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """x [tokens, inputs], weight [2 * intermediate, inputs], gate rows above up rows -> [tokens, intermediate]."""
    if not isinstance(weight, torch.Tensor):
        return activation(_packed_linear(x, weight, bias))
    fused = FUSED.get(activation)
    if fused is not None and (y := ops.linear(x, weight, bias, fused)) is not None:
        return y
    product = ops.linear(x, weight, bias)
    return activation(_product("gated_linear", x, weight, bias) if product is None else product)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [rows, inputs], weight [vocab, inputs] -> fp32 [rows, vocab], rounded to the storage type before."""
    y = ops.linear(hidden, weight, wide_output=True)
    return _product("logits", hidden, weight, None).float() if y is None else y


def _product(operation: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not (
        x.dim() == weight.dim() == 2
        and x.dtype in FLOATS
        and x.dtype == weight.dtype
        and x.shape[1] == weight.shape[1]
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and placed(x, weight, bias)
    ):
        call = Call(operation)
        call.tensor("hidden" if operation == "logits" else "x", x, "tokens inputs")
        call.tensor("weight", weight, "outputs inputs", (x.dtype,))
        if bias is not None:
            call.tensor("bias", bias, "outputs", (x.dtype,))
    if x.is_cuda and x.shape[0] <= tuning.MOST_TOKENS and x.dtype != torch.float32:
        chosen = tuning.choice(x.shape[0], weight.shape[0], weight.shape[1], x.device)
        if chosen is not None and x.stride(1) == weight.stride(1) == 1:
            return tuning.run(chosen, x, weight, bias)
    return F.linear(x, weight, bias)


def _packed_linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, Int4Weight):
        return int4_linear(x, weight, bias)
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight, bias)
    return mxfp4_linear(x, weight, bias)
