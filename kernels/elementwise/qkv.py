"""Head norms, rotation and cache writes: the steps between the fused projection and attention."""

import torch

from pilotlight.kernels.attention.paged import check_slots, kinds_for, require_cache
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.kv_write import store
from pilotlight.kernels.elementwise.norm import head_rms_norm
from pilotlight.kernels.elementwise.rotary import require_pairs, turned


def _check(
    check: ArgumentCheck,
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    has_gates: bool = False,
) -> None:
    require_cache(check, k_cache, v_cache, kv_scales)
    check.tensor("qkv", qkv, "tokens heads+2*kv_heads head_dim", kinds_for(k_cache, kv_scales), dense=1)
    head_dim, kv_heads, all_heads = qkv.shape[2], k_cache.shape[2], qkv.shape[1]
    heads, left = divmod(all_heads - 2 * kv_heads, 1 + has_gates)
    check.require(
        "qkv",
        heads > 0,
        f"has {all_heads} heads, of which {2 * kv_heads} are keys and values; there must be some for queries",
    )
    check.require("qkv", not left, f"has {all_heads - 2 * kv_heads} heads of queries and gates; wanted an even number")
    require_pairs(check, "qkv", qkv)
    check.derive("heads+kv_heads", heads + kv_heads, "qkv")
    for name, values in (("cos", cos), ("sin", sin)):
        check.tensor(name, values, "tokens pairs", (torch.float32,), dense=1)
    pairs = cos.shape[1]
    check.require("cos", 2 * pairs <= head_dim, f"has {pairs} pairs; a head has {head_dim // 2}")
    check.tensor("slot_mapping", slot_mapping, "tokens", (torch.int64,), dense=1)
    if norm is not None:
        check.tensor("norm", norm, "heads+kv_heads head_dim", (qkv.dtype, torch.float32), dense=2)
    check_slots(check, slot_mapping, k_cache)


@operation(_check, triton="elementwise.qkv", native=ops.rotate_and_cache, guards_itself=True)
def rotate_and_cache(
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    has_gates: bool = False,
) -> torch.Tensor:
    """Normalise heads, rotate the first numbers of queries and keys, cache keys and values.

    Return queries [tokens, heads, head_dim]. qkv [tokens, heads + 2 * kv_heads, head_dim], may be overwritten; norm [heads + kv_heads, head_dim] or
    None; cos, sin [tokens, pairs] fp32, of which there may be none; caches, slots and scales as in kv_write. `has_gates`: each query of qkv is
    followed by its gate, which is left as it is. The result is strided between tokens.
    """
    kv_heads = k_cache.shape[2]
    qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]  # one call for both, because queries and keys are rotated alike
    if has_gates:
        qk = torch.cat((qk[:, :-kv_heads:2], qk[:, -kv_heads:]), dim=1)
    if norm is not None:
        qk = head_rms_norm(qk, norm, eps)
    turning = 2 * cos.shape[1]
    qk = torch.cat((turned(qk[..., :turning], cos, sin), qk[..., turning:]), dim=2)
    store(qk[:, -kv_heads:], v, k_cache, v_cache, slot_mapping, kv_scales)
    return qk[:, :-kv_heads]
