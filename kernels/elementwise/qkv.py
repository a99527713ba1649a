"""Head norms, rotation and cache writes: the steps between the fused projection and attention."""

import torch

from pilotlight.kernels import checks
from pilotlight.kernels.attention.paged import check_slots, fits_cache, is_cache, kinds_for, require_cache
from pilotlight.kernels.checks import ArgumentCheck, placed
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.kv_write import store
from pilotlight.kernels.elementwise.norm import head_rms_norm
from pilotlight.kernels.elementwise.rotary import turned


def _check(
    operation: str,
    qkv: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    tokens = qkv.shape[0]
    if not (
        is_cache(k_cache, v_cache, kv_scales)
        and qkv.dim() == 3
        and fits_cache(qkv, k_cache, kv_scales)
        and qkv.shape[1] > 2 * k_cache.shape[2]
        and qkv.shape[2] == k_cache.shape[3]
        and not qkv.shape[2] & 1
        and qkv.stride(2) == 1
        and cos.shape == sin.shape == (tokens, qkv.shape[2] >> 1)
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and slot_mapping.shape == (tokens,)
        and slot_mapping.dtype == torch.int64
        and slot_mapping.is_contiguous()
        and (norm is None or (norm.shape == (qkv.shape[1] - k_cache.shape[2], qkv.shape[2]) and norm.is_contiguous()))
        and (norm is None or norm.dtype == qkv.dtype or norm.dtype == torch.float32)
        and placed(qkv, norm, cos, sin, slot_mapping)
    ):
        check = ArgumentCheck(operation)
        require_cache(check, k_cache, v_cache, kv_scales)
        check.tensor("qkv", qkv, "tokens heads+2*kv_heads head_dim", kinds_for(k_cache, kv_scales), dense=1)
        head_dim, kv_heads, all_heads = qkv.shape[2], k_cache.shape[2], qkv.shape[1]
        check.require(
            "qkv",
            all_heads > 2 * kv_heads,
            f"has {all_heads} heads, of which {2 * kv_heads} are keys and values; there must be some for queries",
        )
        check.require(
            "qkv",
            head_dim % 2 == 0,
            f"has heads of {head_dim} values; wanted an even number, because they are rotated in pairs",
        )
        check.derive("head_dim/2", head_dim // 2, "qkv")
        check.derive("heads+kv_heads", all_heads - kv_heads, "qkv")
        for name, values in (("cos", cos), ("sin", sin)):
            check.tensor(name, values, "tokens head_dim/2", (torch.float32,), dense=1)
        check.tensor("slot_mapping", slot_mapping, "tokens", (torch.int64,), dense=1)
        if norm is not None:
            check.tensor("norm", norm, "heads+kv_heads head_dim", (qkv.dtype, torch.float32), dense=2)
    if checks.DEBUG:
        check_slots(operation, slot_mapping, k_cache)


@operation(_check, triton="elementwise.qkv", native=ops.rotate_and_cache)
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
) -> torch.Tensor:
    """Normalise heads, rotate queries and keys, cache keys and values.

    Return queries [tokens, heads, head_dim]. qkv [tokens, heads + 2 * kv_heads, head_dim], may be overwritten; norm [heads + kv_heads, head_dim] or
    None; cos, sin [tokens, head_dim / 2] fp32; caches, slots and scales as in kv_write. The result is strided between tokens.
    """
    kv_heads = k_cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]  # one call for both, because queries and keys are rotated alike
    if norm is not None:
        qk = head_rms_norm(qk, norm, eps)
    qk = turned(qk, cos, sin)
    store(qk[:, heads:], qkv[:, heads + kv_heads :], k_cache, v_cache, slot_mapping, kv_scales)
    return qk[:, :heads]
